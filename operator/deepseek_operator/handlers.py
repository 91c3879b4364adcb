"""kopf: watches every kind and tells the controller. The only module that knows kopf.

There are only `on.event` handlers, so kopf adds no finalizer and no annotation: objects can be
deleted while the operator is away, and nothing has to be remembered from one event to the next.

kopf runs in a thread with an event loop of its own, because it ends as a whole when one watch
fails, for which a 410 Gone by HTTP is enough, and then cancels every task of its loop. It is
started again, and the controller's work is not touched.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import aiohttp
import kopf
from kopf._core.engines.peering import Identity
from kubernetes.aio.client.rest import RESTClientObject

from deepseek_operator.api import (
    LIST_CHUNK,
    SILENT_WATCH_SECONDS,
    Recorder,
    attributes_of,
    load_credentials,
    trace,
)
from deepseek_operator.kinds import (
    DEEPSEEK_DEPLOYMENT,
    DEEPSEEK_TENANT,
    TENANT_KINDS,
    Kind,
    Manifest,
    watched_kinds,
)
from deepseek_operator.render import MANAGED_BY_SELECTOR
from deepseek_operator.settings import Settings

logger = logging.getLogger(__name__)

Notice = Callable[[str | None, Manifest], None]
Listed = Callable[[str], None]

RESTART_SECONDS = 0.5
LONGEST_RESTART_SECONDS = 15.0
ABANDON_SECONDS = 1.0


class Backoffs:
    """Pauses between kopf's tries of one request: doubling, with jitter, nine times."""

    def __len__(self) -> int:
        """How many pauses there are."""
        return 9

    def __iter__(self) -> Iterator[float]:
        """The pauses of one request."""
        for attempt in range(len(self)):
            yield min(10.0, 0.2 * 2**attempt) * (0.5 + random.random() / 2)  # noqa: S311


class NothingRemembered(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """kopf would compare each object with its last state: nobody asks for that here."""

    def __init__(self) -> None:
        super().__init__()

    def build(self, **_: Any) -> Any:
        """No essence, so that nothing is copied for each event."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """No last state."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing is stored."""

    def purge(self, **_: Any) -> None:
        """Nothing was stored."""

    def touch(self, **_: Any) -> None:
        """Nothing is stored."""

    def clear(self, *, essence: Any) -> Any:
        """The essence as it is."""
        return essence


def tell_of_lists(listed: Listed) -> aiohttp.TraceConfig:
    """Hooks of an aiohttp session that tell of each list that was begun, once it is answered.

    kopf lists at its start, when the version it watched from is too old (410), and when a list
    broke off. It tells of what is there then, and not of what was deleted since it last heard.
    """

    async def ended(_session: Any, _context: Any, request: Any) -> None:
        url = request.url
        is_list = attributes_of(request.method, url.path, url.query).verb == "list"
        if is_list and "continue" not in url.query and request.response.status == HTTPStatus.OK:
            listed(url.path)

    hooks = aiohttp.TraceConfig()
    hooks.on_request_end.append(ended)
    return hooks


def registry_of(
    notice: Notice, listed: Listed, settings: Settings, record: Recorder
) -> kopf.OperatorRegistry:
    """The handlers: every event of every kind is passed on."""
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        configuration = await load_credentials()
        configuration.trace_configs = [trace(configuration, record), tell_of_lists(listed)]
        configuration.connection_pool_maxsize = 0
        session = RESTClientObject(configuration)._create_pool_manager()
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configured(settings, installation)

    async def noticed(event: kopf.RawEvent, **_: Any) -> None:
        notice(event["type"], dict(event["object"]))

    installation = settings
    kopf.on.login(registry=registry)(login)
    kopf.on.startup(registry=registry)(configure)
    for kind in _kinds(settings):
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)(noticed)
    return registry


def _kinds(settings: Settings) -> tuple[Kind, ...]:
    """What kopf watches: tenants are of the whole cluster, and so are the rights on them."""
    kinds = watched_kinds(keda=settings.keda, gateway_api=settings.gateway_api)
    return (*kinds, *TENANT_KINDS) if settings.is_cluster_wide else kinds


def configured(settings: kopf.OperatorSettings, installation: Settings) -> None:
    """Set kopf up: watch, list in chunks, keep nothing, write nothing."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NothingRemembered()
    settings.persistence.progress_storage = NothingRemembered()
    settings.queueing.idle_timeout = 1.0
    settings.networking.request_timeout = installation.api_timeout_seconds
    settings.networking.connect_timeout = 5.0
    settings.networking.error_backoffs = Backoffs()
    settings.watching.chunk_size = LIST_CHUNK
    settings.watching.server_timeout = installation.watch_seconds
    settings.watching.client_timeout = installation.watch_seconds + 30
    # A server that keeps its promise ends the watch before this.
    settings.watching.inactivity_timeout = min(SILENT_WATCH_SECONDS, installation.watch_seconds + 3)
    for kind in _kinds(installation):
        if kind not in {DEEPSEEK_DEPLOYMENT, DEEPSEEK_TENANT}:
            key = (kind.group, kind.version, kind.plural)
            settings.watching.label_selectors[key] = MANAGED_BY_SELECTOR


class Watcher:
    """Runs kopf until stopped, and starts it again when it fails.

    Args:
        notice: Called in the thread of `start` for each event.
        listed: Called in that thread with the path of each list that kopf begins. What was deleted
            before it has to be found by listing after it.
    """

    def __init__(
        self, notice: Notice, listed: Listed, settings: Settings, record: Recorder
    ) -> None:
        self._notice = notice
        self._listed = listed
        self._settings = settings
        self._record = record
        self._stop = threading.Event()
        self._end_of_run = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; events are handed to the running event loop."""
        loop = asyncio.get_running_loop()

        def notice(event_type: str | None, manifest: Manifest) -> None:
            loop.call_soon_threadsafe(self._notice, event_type, manifest)

        def listed(path: str) -> None:
            loop.call_soon_threadsafe(self._listed, path)

        self._thread = threading.Thread(
            target=self._run, args=(notice, listed), name="kopf", daemon=True
        )
        self._thread.start()

    def restart(self) -> None:
        """Watch anew: kopf looks only at its start which kinds there are."""
        self._end_of_run.set()

    async def stop(self) -> None:
        """End the thread, within a few seconds."""
        self._stop.set()
        self._end_of_run.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10.0)

    def _run(self, notice: Notice, listed: Listed) -> None:
        pause = RESTART_SECONDS
        while True:
            self._end_of_run.clear()
            if self._stop.is_set():
                return
            ready = threading.Event()
            loop = asyncio.new_event_loop()
            try:
                loop.run_until_complete(self._watch(notice, listed, ready))
            except Exception as error:
                logger.warning("Watching failed and starts again in %.1f s: %r", pause, error)
            finally:
                _abandon(loop)
            if self._stop.wait(pause * (0.5 + random.random() / 2)):  # noqa: S311
                return
            pause = RESTART_SECONDS if ready.is_set() else min(pause * 2, LONGEST_RESTART_SECONDS)

    async def _watch(self, notice: Notice, listed: Listed, ready: threading.Event) -> None:
        """Run kopf until the first of its root tasks ends: by an error, or by the stop flag."""
        tasks = await kopf.spawn_tasks(
            registry=registry_of(notice, listed, self._settings, self._record),
            clusterwide=self._settings.is_cluster_wide,
            namespaces=self._settings.watch_namespaces,
            standalone=True,
            # kopf would ask for the user's name, which a user id from nowhere does not have.
            identity=Identity(self._settings.holder),
            stop_flag=self._end_of_run,
            ready_flag=ready,
        )
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def _abandon(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still runs in a loop, and leave it after a moment.

    kopf's own way out waits for its watches, which may wait for a login that never comes.
    """
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=ABANDON_SECONDS))
    for task in tasks:
        # Nobody is left to be told that it was still pending.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
