"""How a change reaches the pods: by what is free, by how many there are, through a fallback."""

import copy
from typing import Any

import pytest
from degrading import SMALL
from scenes import NOW, SETTINGS, spec_of
from test_fleet import fleet_of, node, pod

from deepseek_operator.capacity import Room, Seen, View
from deepseek_operator.fleet import Wish
from deepseek_operator.kinds import Manifest
from deepseek_operator.render import Owner, deployment, with_hash
from deepseek_operator.rollout import rollout_of
from deepseek_operator.tiers import tiers_of

GPU = "nvidia.com/gpu"
OWNER = Owner("team", "chat", "uid-of-chat")


def room(*manifests: Manifest) -> Room:
    fleet = fleet_of(*manifests)
    fleet.is_known = bool(manifests)
    return Room({"primary": Wish({GPU: 1})}, fleet)


FREE = room(node())
FULL = room(node(gpus=1), pod("x"))
UNKNOWN = room()


def manifest(document: dict[str, Any], surge: bool = False) -> Manifest:
    tier = tiers_of(spec_of(document))[0].with_replicas(1)
    return with_hash(
        deployment(OWNER, tier.with_rollout("surge" if surge else "replace"), SETTINGS)
    )


def choose(
    room: Room,
    *,
    ready: int = 1,
    waiting: bool = False,
    changed: bool = True,
    old: bool = False,
    surging: bool = False,
    has_fallbacks: bool = False,
    **spec: Any,
) -> tuple[str, bool, bool]:
    """Strategy, whether it goes through a fallback, and whether it is said to wait."""
    document = {"replicas": max(1, ready), **spec}
    live = copy.deepcopy(manifest(document, surging))
    live["metadata"]["generation"] = 1
    live["spec"]["replicas"] = document["replicas"]
    live["status"] = {
        "observedGeneration": 1, "replicas": 2, "updatedReplicas": 1 if old else 2,
    }  # fmt: skip
    wanted = manifest({**document, "pod": {"image": "worker:2"}} if changed else document, surging)
    (tier, *_) = tiers_of(spec_of(document))
    seen = Seen(
        exists=True, asked=1, ready_since=(NOW,) * ready,
        unschedulable_since=(NOW,) if waiting else (), words="0/1 nodes" if waiting else "",
    )  # fmt: skip
    found = rollout_of(
        View(tier, document["replicas"], seen), live, wanted, room, has_fallbacks=has_fallbacks
    )
    return found.strategy, found.goes_via_fallback, found.trouble is not None


# How things are, and: strategy, through a fallback, said to wait.
CASES = {
    "a unit is free": ({"room": FREE}, ("surge", False, False)),
    "nobody knows what is free": ({"room": UNKNOWN}, ("surge", False, False)),
    "nothing is free and there are two": ({"room": FULL, "ready": 2}, ("replace", False, False)),
    "nothing is free and none answers": ({"room": FULL, "ready": 0}, ("replace", False, False)),
    "nothing is free for the only one": ({"room": FULL}, ("surge", False, True)),
    "nothing is free and a fallback can serve": (
        {"room": FULL, "has_fallbacks": True}, ("replace", True, False),
    ),
    "nothing changes": ({"room": FREE, "changed": False}, ("replace", False, False)),
    "nothing changes while it would surge": (
        {"room": FULL, "changed": False, "surging": True}, ("surge", False, False),
    ),
    "a surge goes well": (
        {"room": FULL, "changed": False, "old": True, "surging": True}, ("surge", False, False),
    ),
    "a surge hangs and there are two": (
        {"room": FULL, "changed": False, "old": True, "surging": True, "waiting": True, "ready": 2},
        ("replace", False, True),
    ),
    "a surge hangs and a fallback can serve": (
        {
            "room": UNKNOWN, "changed": False, "old": True, "surging": True, "waiting": True,
            "has_fallbacks": True,
        },
        ("surge", True, True),
    ),
    "replacing goes on": ({"room": FREE, "changed": False, "old": True}, ("replace", False, False)),
    "surge is asked for": ({"room": FULL, "rollout": "surge"}, ("surge", False, False)),
    "replace is asked for": ({"room": FREE, "rollout": "replace"}, ("replace", False, False)),
    "a CPU always surges": ({"room": FULL, "gpu": {"mode": "cpu"}}, ("surge", False, False)),
    "a fallback is asked for": (
        {"room": FREE, "rollout": "viaFallback", "fallbacks": [SMALL]}, ("replace", True, False),
    ),
    "a fallback is asked for and nothing changes": (
        {"room": FREE, "rollout": "viaFallback", "fallbacks": [SMALL], "changed": False},
        ("replace", False, False),
    ),
    "a fallback is asked for and none answers": (
        {"room": FREE, "rollout": "viaFallback", "fallbacks": [SMALL], "ready": 0},
        ("replace", False, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("how", "outcome"), CASES.values(), ids=CASES)
def test_a_change_reaches_the_pods(how: dict[str, Any], outcome: tuple[str, bool, bool]) -> None:
    assert choose(**how) == outcome


def test_a_removed_field_is_a_change_too() -> None:
    before = {"pod": {"nodeSelector": {"disk": "ssd"}}}
    live = {**manifest(before), "status": {"observedGeneration": 1}}
    (tier, *_) = tiers_of(spec_of({}))

    found = rollout_of(View(tier, 1, Seen()), live, manifest({}), FULL, has_fallbacks=False)

    assert found.is_new


@pytest.mark.parametrize("number", [1, 2])
def test_another_number_of_pods_is_no_rollout(number: int) -> None:
    live = copy.deepcopy(manifest({"rollout": "viaFallback", "fallbacks": [SMALL]}))
    live["metadata"]["generation"] = 2
    live["spec"]["replicas"] = number
    live["status"] = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1}
    (tier, *_) = tiers_of(spec_of({"rollout": "viaFallback", "fallbacks": [SMALL]}))
    wanted = manifest({"rollout": "viaFallback", "fallbacks": [SMALL]})

    found = rollout_of(
        View(tier, 1, Seen(ready_since=(NOW,))), live, wanted, FREE, has_fallbacks=True
    )

    # The controller has not seen the last change, which is of the pods if the number is the same.
    assert found.goes_via_fallback is (number == 1)
