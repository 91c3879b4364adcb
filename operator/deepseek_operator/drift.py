"""Where a live object differs from what was applied.

Pure. Server-side apply leaves fields of other writers alone, so a live object may hold more than
the manifest: defaults, a sidecar, a label of somebody's tool. It has drifted when a field of the
manifest has another value or is gone. Lists and maps that the API server treats as one value
must be equal as a whole, or else a key added to a Service's selector would go unseen.

Source: the listType and mapType marks of k8s.io/api, as far as our manifests use them; for what an
admission webhook makes of an apply, `applyPatch` before `applyAdmission` in
k8s.io/apiserver/pkg/endpoints/handlers/patch.go.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

from deepseek_operator.kinds import Manifest
from deepseek_operator.render import HASH_ANNOTATION

_LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
}
"""Lists whose items are told apart by a field: items of other writers may be among them."""

_WHOLE_MAPS = frozenset(
    {"selector", "nodeSelector", "podSelector", "namespaceSelector", "labelSelector"}
)
_AMOUNTS = frozenset({"requests", "limits", "sizeLimit"})
_SCALES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
"""All of Kubernetes' suffixes: pods and quotas of others are read with them too."""


def deviations(
    desired: Manifest, live: Manifest, applied: Manifest | None = None
) -> tuple[str, ...]:
    """The paths at which the live object does not hold what the manifest says.

    Each comes with the live value; there is none when nothing drifted.

    Args:
        desired: The manifest.
        live: The object.
        applied: Of fields that the manifest was applied with, those that nobody else has changed
            since, as `fieldsV1` names them: whatever they hold, an admission webhook made it of
            what was applied.
    """
    found: list[str] = []
    for key, value in desired.items():
        if key in {"apiVersion", "kind", "status"}:
            continue
        _compare(value, live.get(key), (key, key), _part(applied, f"f:{key}"), found)
    return tuple(found)


def applied_fields(desired: Manifest, live: Manifest) -> Manifest | None:
    """The fields of a live object's view that are as they came of applying this very manifest.

    Whoever changes a field takes it over, be it by an update or by another apply; what admission
    makes of a request is not told from what was asked for. None where another manifest was applied
    last, or nobody knows.
    """
    ours, theirs = (
        (manifest["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
        for manifest in (desired, live)
    )
    if ours is None or ours != theirs or "appliedFields" not in live:
        return None
    fields: Manifest = json.loads(live["appliedFields"])
    return fields


def _part(applied: Manifest | None, key: str) -> Manifest | None:
    """Of a field's fields, one; a field that has none of its own is applied as a whole."""
    return applied.get(key) if applied else applied


def _compare(
    desired: Any, live: Any, where: tuple[str, str], applied: Manifest | None, found: list[str]
) -> None:
    """Compare at a path, which comes with the name of its last field."""
    path, _ = where
    if live is None:
        # The API server drops false, 0 and empty values of optional fields.
        if desired and applied is None:
            found.append(f"{path}=∅")
    elif isinstance(desired, dict) and isinstance(live, dict):
        _compare_maps(desired, live, where, applied, found)
    elif isinstance(desired, list) and isinstance(live, list):
        _compare_lists(desired, live, where, applied, found)
    elif desired != live and not (_is_amount(path) and _is_same_amount(desired, live)):
        _note(f"{path}={live!r}", applied, found)


def _note(deviation: str, applied: Manifest | None, found: list[str]) -> None:
    """Take in a deviation, unless what is there was made of what was applied."""
    if applied != {}:
        found.append(deviation)


def _compare_maps(
    desired: Manifest,
    live: Manifest,
    where: tuple[str, str],
    applied: Manifest | None,
    found: list[str],
) -> None:
    path, field = where
    if field in _WHOLE_MAPS and desired != live:
        _note(f"{path}={live!r}", applied, found)
        return
    for key, value in desired.items():
        # A version in a manifest says on which state it may be applied.
        if key != "resourceVersion":
            part = _part(applied, f"f:{key}")
            _compare(value, live.get(key), (f"{path}.{key}", key), part, found)


def _compare_lists(
    desired: list[Any],
    live: list[Any],
    where: tuple[str, str],
    applied: Manifest | None,
    found: list[str],
) -> None:
    path, field = where
    key = _LIST_KEYS.get(field)
    if key is not None:
        by_key = {item.get(key): item for item in live}
        for item in desired:
            name = json.dumps({key: item[key]}, separators=(",", ":"), ensure_ascii=False)
            part = applied.get(f"k:{name}") if applied else None
            _compare(item, by_key.get(item[key]), (f"{path}[{item[key]}]", field), part, found)
    elif len(desired) != len(live):
        _note(f"{path}={live!r}", applied, found)
    else:
        # Items without a name are not told apart, unless the list is one value.
        part = applied if applied == {} else None
        for index, (item, live_item) in enumerate(zip(desired, live, strict=True)):
            _compare(item, live_item, (f"{path}[{index}]", field), part, found)


def _is_amount(path: str) -> bool:
    return not _AMOUNTS.isdisjoint(path.split("."))


def _is_same_amount(desired: Any, live: Any) -> bool:
    """Whether two quantities are equal, however they are written: 1000m is 1, 0.5Gi is 512Mi."""
    try:
        return amount_of(desired) == amount_of(live)
    except ValueError:
        return False


def amount_of(value: Any) -> Fraction:
    """What a quantity amounts to, in any form in which the API server stores one.

    Raises:
        ValueError: The value is no quantity.
    """
    text = str(value)
    for suffix in sorted(_SCALES, key=len, reverse=True):
        if text.endswith(suffix):
            return Fraction(text.removesuffix(suffix)) * _SCALES[suffix]
    return Fraction(text)
