"""A plan in the making: what is to be written is added step by step.

Pure. `plan` and the modules below it add to one draft; of it the plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_operator.drift import deviations
from deepseek_operator.kinds import SERVICE_ACCOUNT, Manifest, Reference, reference
from deepseek_operator.observed import Observed
from deepseek_operator.render import TOKEN_KEY


class Draft:
    """What was added so far."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self.to_apply: list[Manifest] = []
        self.to_create: list[Manifest] = []
        self.to_delete: list[Manifest] = []
        self.again_seconds: float | None = None
        self.reasons: list[str] = []

    def ensure(self, manifest: Manifest, live_objects: Mapping[Reference, Manifest]) -> None:
        """Apply the manifest if the live object is missing or differs."""
        key = reference(manifest)
        live = live_objects.get(key)
        if live is None:
            # Somebody else's ServiceAccount would not conflict with ours, so it is not applied.
            is_created = key.kind == SERVICE_ACCOUNT.kind
            (self.to_create if is_created else self.to_apply).append(manifest)
            self.reasons.append(f"{key.kind} {key.name} is missing")
        elif "deletionTimestamp" not in live["metadata"]:
            found = deviations(manifest, live)
            if found and found != self._observed.tolerated.get(key):
                self.to_apply.append(manifest)
                self.reasons.append(f"{key.kind} {key.name} differs: {', '.join(found)[:500]}")

    def ensure_token(self, manifest: Manifest) -> None:
        """Create the Secret once; of a live one only labels and the like are kept up."""
        key = reference(manifest)
        live = self._observed.children.get(key)
        if live is not None and TOKEN_KEY in live["keys"]:
            self.ensure(manifest, self._observed.children)
        elif live is None or "deletionTimestamp" not in live["metadata"]:
            self.create(manifest, f"Secret {key.name} has no token")

    def create(self, manifest: Manifest, reason: str) -> None:
        """Make an object that must not exist yet."""
        self.to_create.append(manifest)
        self.reasons.append(reason)

    def delete(self, live: Manifest, reason: str) -> None:
        """Remove a live object."""
        self.to_delete.append(live)
        self.reasons.append(reason)

    def look_again(self, seconds: float) -> None:
        """Plan anew after this time at the latest."""
        again = self.again_seconds
        self.again_seconds = seconds if again is None else min(again, seconds)
