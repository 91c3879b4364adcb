"""Where a live object differs from what was applied.

Pure. Server-side apply leaves fields of other writers alone, so a live object may hold more than
the manifest: defaults, a sidecar, a label of somebody's tool. It has drifted when a field of the
manifest has another value or is gone. Lists and maps that the API server treats as one value
must be equal as a whole, or else a key added to a Service's selector would go unseen.

Source: the listType and mapType marks of k8s.io/api, as far as our manifests use them.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from deepseek_operator.kinds import Manifest

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


def deviations(desired: Manifest, live: Manifest) -> tuple[str, ...]:
    """The paths at which the live object does not hold what the manifest says.

    Each comes with the live value; there is none when nothing drifted.
    """
    found: list[str] = []
    for key, value in desired.items():
        if key in {"apiVersion", "kind", "status"}:
            continue
        _compare(value, live.get(key), key, key, found)
    return tuple(found)


def _compare(desired: Any, live: Any, path: str, field: str, found: list[str]) -> None:
    if live is None:
        # The API server drops false, 0 and empty values of optional fields.
        if desired:
            found.append(f"{path}=∅")
    elif isinstance(desired, dict) and isinstance(live, dict):
        _compare_maps(desired, live, path, field, found)
    elif isinstance(desired, list) and isinstance(live, list):
        _compare_lists(desired, live, path, field, found)
    elif desired != live and not (_is_amount(path) and _is_same_amount(desired, live)):
        found.append(f"{path}={live!r}")


def _compare_maps(
    desired: Manifest, live: Manifest, path: str, field: str, found: list[str]
) -> None:
    if field in _WHOLE_MAPS and desired != live:
        found.append(f"{path}={live!r}")
        return
    for key, value in desired.items():
        # A version in a manifest says on which state it may be applied.
        if key != "resourceVersion":
            _compare(value, live.get(key), f"{path}.{key}", key, found)


def _compare_lists(
    desired: list[Any], live: list[Any], path: str, field: str, found: list[str]
) -> None:
    key = _LIST_KEYS.get(field)
    if key is not None:
        by_key = {item.get(key): item for item in live}
        for item in desired:
            _compare(item, by_key.get(item[key]), f"{path}[{item[key]}]", field, found)
    elif len(desired) != len(live):
        found.append(f"{path}={live!r}")
    else:
        for index, (item, live_item) in enumerate(zip(desired, live, strict=True)):
            _compare(item, live_item, f"{path}[{index}]", field, found)


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
