"""Launch configurations by shape bucket, read from static tables; nothing tunes at run time.

`configs/<op>.json` is made by `python -m deepseek_kernels.tuning <op>` on the GPU. Its
buckets are ordered: the first whose limits all hold decides.
"""

import functools
import json
from importlib import resources
from typing import Any, NamedTuple


class Bucket(NamedTuple):
    """A configuration and the sizes up to which it applies."""

    limits: dict[str, int]
    config: dict[str, int]


@functools.cache
def table(op: str) -> tuple[Bucket, ...]:
    """Return an operation's buckets in order.

    Raises:
        ValueError: The table lacks a last bucket without limits.
    """
    text = resources.files("deepseek_kernels").joinpath("configs", f"{op}.json").read_text()
    rows: list[dict[str, Any]] = json.loads(text)["buckets"]
    buckets = tuple(Bucket(row["limits"], row["config"]) for row in rows)
    if not buckets or buckets[-1].limits:
        raise ValueError(f"configs/{op}.json must end with a bucket whose limits are empty")
    return buckets


@functools.lru_cache(maxsize=4096)
def _pick(op: str, sizes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    given = dict(sizes)
    return next(
        bucket.config
        for bucket in table(op)
        if all(given[name] <= limit for name, limit in bucket.limits.items())
    )


def pick(op: str, **sizes: int) -> dict[str, int]:
    """Return the configuration of the first bucket that holds these sizes.

    Example: `pick("norm", columns=4096)` is `{"rows": 1, "num_warps": 8}`. Callers must not
    change what they get: it is the cached table.
    """
    return _pick(op, tuple(sizes.items()))
