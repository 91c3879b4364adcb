"""In which order everything is looked at again."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import owner_of

from deepseek_operator.api import Api
from deepseek_operator.cluster import Name
from deepseek_operator.controller import Controller
from deepseek_operator.health import Health
from deepseek_operator.kinds import DEEPSEEK_DEPLOYMENT, Kind, Manifest
from deepseek_operator.metrics import Metrics
from deepseek_operator.settings import Settings

CHANCE_OF_BAD_LUCK = 1e-12
SETTINGS = Settings(max_concurrent_reconciles=1, watch_namespaces=("team",))


class Listing:
    """An API server that tells of its objects in the same order each time."""

    def __init__(self, num_objects: int) -> None:
        self.names = [f"chat-{number}" for number in range(num_objects)]

    async def chunks(
        self, kind: Kind, *_: object, **__: object
    ) -> AsyncIterator[tuple[list[Manifest], str]]:
        """All there is."""
        names = self.names if kind == DEEPSEEK_DEPLOYMENT else []
        yield [owner_of(name=name) for name in names], "50"


class Mortal(Controller):
    """Looks at some objects, and then is killed."""

    def __init__(self, listing: Listing, num_looks: int) -> None:
        super().__init__(cast("Api", listing), SETTINGS, Health(SETTINGS.watch_seconds, Metrics()))
        self.seen: list[str] = []
        self._num_looks = num_looks

    async def reconcile(self, name: Name) -> float | None:
        if len(self.seen) < self._num_looks:
            self.seen.append(name.name)
        return None


async def looks_of(listing: Listing, num_looks: int) -> list[str]:
    """What one process looks at, from its start to its end."""
    mortal = Mortal(listing, num_looks)
    await mortal.resync()
    await mortal.queue.settle()
    await mortal.queue.close(0)
    return mortal.seen


@given(st.data())
@settings(max_examples=30)
async def test_processes_that_end_early_come_to_every_object_all_the_same(
    data: st.DataObject,
) -> None:
    num_objects = data.draw(st.integers(1, 8), "objects")
    num_looks = data.draw(st.integers(1, num_objects), "looks of a process")
    listing = Listing(num_objects)
    # So many that an object is missed by all of them with next to no probability.
    share_missed = 1 - num_looks / num_objects
    num_lives = (
        math.ceil(math.log(CHANCE_OF_BAD_LUCK / num_objects) / math.log(share_missed))
        if share_missed
        else 1
    )

    lives = [await looks_of(listing, num_looks) for _ in range(num_lives)]

    assert {name for life in lives for name in life} == set(listing.names)


async def test_each_look_at_everything_is_at_each_object_once() -> None:
    listing = Listing(20)

    assert sorted(await looks_of(listing, 100)) == sorted(listing.names)
