"""Keeps the fleet up to date: lists and watches all nodes and pods of the cluster.

kopf is not used here: it keeps whole objects in a queue for each, and of thousands of foreign pods
only a few numbers are needed. In namespaced mode this does not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence

from deepseek_operator.api import Api
from deepseek_operator.errors import ApiError, NotFoundError
from deepseek_operator.fleet import Fleet
from deepseek_operator.kinds import NODE, POD, Kind, Manifest
from deepseek_operator.settings import Settings

logger = logging.getLogger(__name__)

CHUNK = 250
"""Objects in one answer to a list: nodes list their images and are large."""
LIVE_PODS = "status.phase!=Succeeded,status.phase!=Failed"
"""The server leaves out pods that have ended, and tells of those that end as deleted."""
AGAIN_SECONDS = 1.0
LONGEST_AGAIN_SECONDS = 30.0


class Survey:
    """Feeds a fleet until cancelled.

    Args:
        listeners: Called after units were given back or taken, or a node came, went or changed.
    """

    def __init__(
        self,
        api: Api,
        fleet: Fleet,
        settings: Settings,
        listeners: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._api = api
        self._fleet = fleet
        self._settings = settings
        self._listeners = listeners
        self._versions: dict[Kind, str] = {}

    async def run(self) -> None:
        """List, then watch, and list again whenever the watch is too old."""
        await asyncio.gather(self._follow(NODE), self._follow(POD))

    async def list_once(self) -> None:
        """List both kinds, so that the fleet is known before anything is decided.

        Raises:
            ApiError: One of them cannot be listed.
        """
        for kind in (NODE, POD):
            await self._list(kind)
        self._fleet.is_known = True

    async def _follow(self, kind: Kind) -> None:
        pause = AGAIN_SECONDS
        while True:
            try:
                if kind not in self._versions:
                    await self._list(kind)
                await self._watch(kind)
                pause = AGAIN_SECONDS
                continue
            except NotFoundError:
                # Too old: what happened since can only be seen by listing.
                self._versions.pop(kind, None)
            except ApiError as error:
                logger.warning("Cannot follow %s, again in %.0f s: %s", kind.plural, pause, error)
            except Exception:
                # Capacity must not stand still for an object that nobody thought of.
                self._versions.pop(kind, None)
                logger.exception("Cannot follow %s, again in %.0f s", kind.plural, pause)
            await asyncio.sleep(pause * (0.5 + random.random() / 2))  # noqa: S311
            pause = min(2 * pause, LONGEST_AGAIN_SECONDS)

    async def _list(self, kind: Kind) -> None:
        seen: set[str] = set()
        version = "0"
        fields = LIVE_PODS if kind == POD else ""
        has_changed = False
        async for items, version in self._api.chunks(kind, None, fields=fields, limit=CHUNK):  # noqa: B007 - the last one counts
            for item in items:
                seen.add(_key(item))
                has_changed |= self._take(kind, None, item)
        keep = self._fleet.keep_pods if kind == POD else self._fleet.keep_nodes
        has_changed |= keep(seen)
        self._versions[kind] = version
        if has_changed:
            self._changed()

    async def _watch(self, kind: Kind) -> None:
        """One watch, until the server ends it."""
        fields = LIVE_PODS if kind == POD else ""
        events = self._api.watch(
            kind, self._versions[kind], fields=fields, seconds=self._settings.watch_seconds
        )
        async with contextlib.aclosing(events):
            async for event_type, manifest in events:
                self._versions[kind] = manifest["metadata"]["resourceVersion"]
                if event_type != "BOOKMARK" and self._take(kind, event_type, manifest):
                    self._changed()

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _take(self, kind: Kind, event_type: str | None, manifest: Manifest) -> bool:
        notice = self._fleet.notice_pod if kind == POD else self._fleet.notice_node
        return notice(event_type, manifest)


def _key(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])
