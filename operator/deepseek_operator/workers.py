"""What the workers say of themselves, and what to make of their silence.

Pure. `probe.py` asks each worker for `GET /state` and hands every answer, or what came instead of
one, to `Readings.take`; the status and the recovery read the result. Times are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deepseek_contract.state import DEVICE_REASONS, WorkerState
from deepseek_operator.kinds import Manifest
from deepseek_operator.pods import is_ready

Outcome = Literal["answered", "silent", "refused", "forbidden", "unreadable"]
"""`silent`: no answer in time, or no way there. `refused`: the node answers, and nobody listens
at the port. `forbidden`: the token is not taken. `unreadable`: not the document of a worker."""

MISSES = 3
"""After so many silences in a row the worker does not answer."""
TOLD_POINTS = 5.0
"""By how much the used memory must change to be news."""
MOST_PERCENT = 100_000
"""What the status may say at most; a worker with a broken counter says more."""
FEWEST_NODES_TO_DOUBT = 3
"""With fewer silent nodes than this, silence is taken as theirs and not as our own deafness."""


@dataclass(frozen=True)
class Sample:
    """What came of asking one worker once."""

    outcome: Outcome
    message: str = ""
    """What came instead of an answer, for people."""
    state: WorkerState | None = None


@dataclass(frozen=True)
class Reading:
    """All that is known of a worker from asking it."""

    sample: Sample
    state: WorkerState | None = None
    """The last one that was understood."""
    misses: int = 0
    """Silences in a row."""
    silent_since: float | None = None
    """When the first of them was asked."""
    retried_at: float | None = None
    """When a batch was last seen to have been tried again for want of memory."""
    uncounted_retries: int = 0
    """Such batches that no status has counted yet."""
    told_percent: float = 0.0
    """Used memory when it was last news."""

    @property
    def is_lost(self) -> bool:
        """Whether the worker has been silent too often."""
        return self.misses >= MISSES

    @property
    def has_answered(self) -> bool:
        """Whether this process has heard the worker, so that its silence means something."""
        return self.state is not None


@dataclass
class Readings:
    """The newest reading of each worker, by the uid of its pod."""

    _by_uid: dict[str, Reading] = field(default_factory=dict)

    def get(self, uid: str) -> Reading | None:
        """The reading of a pod, if it was ever asked."""
        return self._by_uid.get(uid)

    def take(self, uid: str, sample: Sample, now: float) -> bool:
        """Take in what came of asking a worker; whether that is news for its object."""
        old = self._by_uid.get(uid)
        new = following(old, sample, now)
        if not is_news(old, new):
            self._by_uid[uid] = new
            return False
        used = new.state.used_percent if new.state is not None else 0.0
        self._by_uid[uid] = replace(new, told_percent=used)
        return True

    def counted(self, pods: Iterable[Manifest]) -> None:
        """A status that counts the retries of these pods has been written."""
        for uid, reading in self.of(pods).items():
            self._by_uid[uid] = replace(reading, uncounted_retries=0)

    def keep_only(self, uids: set[str]) -> None:
        """Forget the workers that are gone."""
        for uid in self._by_uid.keys() - uids:
            del self._by_uid[uid]

    def of(self, pods: Iterable[Manifest]) -> Mapping[str, Reading]:
        """The readings of some pods, by uid."""
        found = ((pod["metadata"]["uid"], self._by_uid.get(pod["metadata"]["uid"])) for pod in pods)
        return {uid: reading for uid, reading in found if reading is not None}


def following(old: Reading | None, sample: Sample, now: float) -> Reading:
    """The reading after one more sample."""
    before = old or Reading(sample)
    if sample.outcome == "silent":
        since = before.silent_since if before.misses else now
        return replace(before, sample=sample, misses=before.misses + 1, silent_since=since)
    quiet = replace(before, sample=sample, misses=0, silent_since=None)
    state = sample.state
    if state is None:
        return quiet
    retries = _retries_since(before.state, state)
    return replace(
        quiet,
        state=state,
        retried_at=now if retries else before.retried_at,
        uncounted_retries=before.uncounted_retries + retries,
    )


def is_news(old: Reading | None, new: Reading) -> bool:
    """Whether the difference can change what is done or told."""
    if old is None:
        return True
    used = new.state.used_percent if new.state is not None else 0.0
    return (
        _essence(old) != _essence(new)
        or old.retried_at != new.retried_at
        or abs(used - old.told_percent) >= TOLD_POINTS
    )


def fault(state: WorkerState) -> str | None:
    """What is wrong with a worker that answers and that another device may not have."""
    if state.phase == "failed" and state.reason in DEVICE_REASONS:
        return f"its device failed ({state.reason}): {state.message or 'no message'}"
    if state.is_stalled:
        return f"its engine has work and has finished no step for {state.seconds_since_step:.0f} s"
    if state.is_exhausted:
        return (
            "its memory does not suffice for single requests any more"
            f" ({state.out_of_memory_failures} failed alone)"
        )
    return None


def memory_status(
    pods: Iterable[Manifest], readings: Mapping[str, Reading], previous: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """`status.memory`: of the Ready worker that uses most.

    The previous value stays as long as the percentage moved by less than `TOLD_POINTS` and nothing
    else changed, so that live values do not keep the status busy; nobody Ready keeps it too.
    """
    states = [
        reading.state
        for pod in pods
        if is_ready(pod)
        and (reading := readings.get(pod["metadata"]["uid"])) is not None
        and reading.state is not None
        and reading.state.memory.measured_bytes
    ]
    if not states:
        return dict(previous) if previous else None
    fullest = max(states, key=lambda state: state.used_percent)
    memory = fullest.memory
    found: dict[str, Any] = {
        "predictedBytes": dict(memory.predicted_bytes),
        "measuredBytes": dict(memory.measured_bytes),
        "limitBytes": memory.limit_bytes,
        "usedPercent": min(MOST_PERCENT, round(fullest.used_percent)),
    }
    if previous is not None and _is_as_told(previous, found):
        return dict(previous)
    return found


def is_deaf(readings_by_node: Mapping[str, Iterable[Reading]]) -> bool:
    """Whether so many nodes are silent at once that it is rather us who hear nothing.

    Args:
        readings_by_node: Of every node with a worker that has ever answered.
    """
    silent = heard = 0
    for readings in readings_by_node.values():
        if all(reading.is_lost for reading in readings):
            silent += 1
        else:
            heard += 1
    return silent >= FEWEST_NODES_TO_DOUBT and silent > heard


def _retries_since(known: WorkerState | None, state: WorkerState) -> int:
    """Batches tried again between two answers; those before the first one were counted before."""
    if known is None:
        return 0
    is_same_process = known.started_at == state.started_at
    before = known.out_of_memory_retries if is_same_process else 0
    return max(0, state.out_of_memory_retries - before)


def _is_as_told(previous: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    rest = ("predictedBytes", "limitBytes")
    return (
        all(previous.get(key) == found[key] for key in rest)
        and abs(previous.get("usedPercent", MOST_PERCENT) - found["usedPercent"]) < TOLD_POINTS
    )


def _essence(reading: Reading) -> tuple[object, ...]:
    state = reading.state
    told = None
    if state is not None:
        told = (state.phase, state.reason, state.is_stalled, state.is_exhausted)
    outcome = reading.sample.outcome
    # The first silences may be passing, and an outcome's own words are no news.
    is_settled = outcome != "silent" or reading.is_lost
    return (reading.is_lost, outcome if is_settled else "answered", told)
