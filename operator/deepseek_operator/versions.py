"""Which of two tellings of an object is the later one, and which objects are gone.

Pure. Lists, watch events and answers to own writes arrive in any order, so what is older must not
win over what is newer, and nothing may come back that is gone.
"""

from __future__ import annotations

from collections import OrderedDict

from deepseek_operator.kinds import Manifest

REMEMBERED = 10_000
"""Objects that are known to be gone. What is late is late by seconds, so old ones may go."""


def is_newer(manifest: Manifest, old: Manifest) -> bool:
    """Whether a manifest is of a later version; versions can be compared since Kubernetes 1.35."""
    return _is_later(manifest["metadata"]["resourceVersion"], old["metadata"]["resourceVersion"])


class Departed:
    """Objects that went away, by uid. A uid is never given again."""

    def __init__(self) -> None:
        self._last_versions: OrderedDict[str, str | None] = OrderedDict()

    def add(self, manifest: Manifest) -> None:
        """It was out of sight at this version, and may come back at a later one.

        That is what a watch by a label says of an object that only lost the label.
        """
        metadata = manifest["metadata"]
        if not self._is_gone_for_good(metadata["uid"]):
            self._remember(metadata["uid"], metadata["resourceVersion"])

    def add_for_good(self, uid: str) -> None:
        """The API server has no object of this uid any more, so whatever is told of it is late."""
        self._remember(uid, None)

    def discard(self, uid: str) -> None:
        """It is back."""
        self._last_versions.pop(uid, None)

    def is_back(self, manifest: Manifest) -> bool:
        """Whether an object that went away is told of as of a later version than that."""
        metadata = manifest["metadata"]
        last = self._last_versions.get(metadata["uid"])
        return last is not None and _is_later(metadata["resourceVersion"], last)

    def __contains__(self, uid: str) -> bool:
        """Whether the object of this uid went away."""
        return uid in self._last_versions

    def _is_gone_for_good(self, uid: str) -> bool:
        return uid in self._last_versions and self._last_versions[uid] is None

    def _remember(self, uid: str, version: str | None) -> None:
        self._last_versions[uid] = version
        self._last_versions.move_to_end(uid)
        while len(self._last_versions) > REMEMBERED:
            self._last_versions.popitem(last=False)


def _is_later(version: str, other: str) -> bool:
    if version.isdecimal() and other.isdecimal():
        return int(version) > int(other)
    return version != other
