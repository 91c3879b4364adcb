"""Objects whose primary needs two GPUs, on a cluster that loses and finds them."""

from __future__ import annotations

import copy
from typing import Any

from small_cluster import START_SECONDS, SmallCluster

SMALL = {"name": "small", "model": {"source": "package://small"}, "gpu": {"count": 1}}
MEDIUM = {"name": "medium", "model": {"source": "package://medium"}, "gpu": {"count": 2}}
TWO_GPUS = {
    "model": {"source": "package://large"},
    "gpu": {"count": 2},
    "fallbacks": [SMALL],
    "degrade": {"afterSeconds": 60},
    "promote": {"afterSeconds": 120},
}
CHAIN: dict[str, Any] = {"gpu": {"count": 4}, "fallbacks": [MEDIUM, SMALL]}
START = START_SECONDS + 4
"""From asking for a pod until its being ready is seen."""


def cluster(document: dict[str, Any] | None = None, **options: Any) -> SmallCluster:
    made = SmallCluster(copy.deepcopy({**TWO_GPUS, **(document or {})}), **options)
    made.run(START)
    return made


def lose(made: SmallCluster, **left: int) -> None:
    """Others take all GPUs but these, and the primary's pods with their nodes' GPUs are gone."""
    end_pods(made, "primary")
    made.taken = {name: number - left.get(name, 0) for name, number in made.gpus.items()}


def end_pods(made: SmallCluster, tier: str) -> None:
    """A tier's pods are gone, all at once."""
    made.pods = [p for p in made.pods if p["metadata"]["labels"]["deepseek.dev/tier"] != tier]


def give_back(made: SmallCluster) -> None:
    made.taken = {}


def degraded(document: dict[str, Any] | None = None, **options: Any) -> SmallCluster:
    made = cluster(document, **options)
    lose(made, a=1)
    made.until("FallbackServing")
    made.run(20)
    return made
