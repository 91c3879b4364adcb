"""Level 2 of the recovery ladder: which pods leave their node, and when it is level 3's turn.

Pure: pods, what the workers say, the nodes, what the status remembers and the time go in, a
`Decision` comes out. Nothing is kept here: what has to survive a restart is on the quarantined pods
themselves and in `status.recovery`.

A pod whose device or node failed is quarantined: it gets the label `deepseek.dev/quarantine` in the
place of those that the Service and the ReplicaSet select it by. Both let go of it at once. The pod
template carries required anti-affinity to that label, so the replacement goes to another node. When
that is bound, the quarantined pod is ended. How often that may happen is bounded by the budget an
hour, counted in pods, and a pause that doubles with each event for which nodes were left.

The pause is against a fault that pods carry along: a replacement that breaks its node too must not
go through the cluster. Nodes that are lost together, as with a zone, are no such sequence: pods
that were there before the others left, or that never ran, leave a lost node at once, within the
budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from deepseek_contract.state import DEVICE_REASONS
from deepseek_operator.kinds import Manifest
from deepseek_operator.pods import has_run, is_ready, last_words, sentence
from deepseek_operator.workers import FEWEST_NODES_TO_DOUBT, Reading, fault

QUARANTINE_LABEL = "deepseek.dev/quarantine"
"""On a quarantined pod: the name of its object."""
QUARANTINED_AT = "deepseek.dev/quarantined-at"
CAUSE_ANNOTATION = "deepseek.dev/quarantine-cause"
REASON_ANNOTATION = "deepseek.dev/quarantine-reason"
TIER_ANNOTATION = "deepseek.dev/quarantine-tier"

Cause = Literal["NodeSilent", "EngineStalled", "DeviceFault", "MemoryExhausted"]
CAUSES: tuple[Cause, ...] = ("NodeSilent", "EngineStalled", "DeviceFault", "MemoryExhausted")

_WORDS: Mapping[str, str] = {
    "NodeSilent": "the node does not answer",
    "EngineStalled": "its engine made no progress",
    "DeviceFault": "its device failed",
    "MemoryExhausted": "memory did not suffice even for single requests",
}
HOUR = timedelta(hours=1)
FIRST_PAUSE_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 600.0
"""Between two events: doubling with each event of the last hour."""
SAME_EVENT_SECONDS = 60.0
"""Pods of one node that follow each other within this leave it for the same cause."""
CLOCKS_APART_SECONDS = 30.0
"""How far the API server's clock, which dates pods, may be from ours, which dates switches."""
RESTARTS_ON_ONE_DEVICE = 3
PATIENCE_SECONDS = 20.0
"""How long a quarantined pod keeps its units while no other node takes the replacement. Then it
ends, and the replacement may have them."""
SILENT_PATIENCE_SECONDS = 75.0
"""The same while the node is silent and the cluster has not noticed yet: until it has, the pod is
what keeps the replacement away from there."""
SILENT_GRACE_SECONDS = 5
"""How long a pod that says nothing any more may take to end."""
OVERDUE_SECONDS = 5.0
"""After its grace period a pod of a lost node is deleted without waiting for the node."""
RETRYING_SECONDS = 60.0
"""How long after a batch was tried again the ladder stands on level 1."""
MAX_SWITCHES = 60


@dataclass(frozen=True)
class Case:
    """All that one decision is made from."""

    pods: tuple[Manifest, ...]
    """The object's workers, of all tiers, without those in quarantine."""
    quarantined: tuple[Manifest, ...]
    wanted: Mapping[str, int]
    """Pods that each tier's Deployment asks for."""
    readings: Mapping[str, Reading]
    """By uid of the pod."""
    now: datetime
    tier_of: Mapping[str, str] = field(default_factory=dict)
    """Tier of each pod, by uid."""
    ready_nodes: Mapping[str, bool] | None = None
    """Whether each node is ready; None where the operator may not see nodes."""
    is_deaf: bool = False
    """Whether most nodes are silent at once, so that it is rather the operator who is cut off."""
    switches_per_hour: int = 6
    status: Mapping[str, Any] = field(default_factory=dict)
    """`status.recovery` as it is."""
    is_degraded: bool = False
    """Whether a fallback serves."""
    degradations: int = 0

    def node_is_ready(self, pod: Manifest) -> bool | None:
        """Whether a pod's node is ready; None when nobody knows. A node that is gone is not."""
        if self.ready_nodes is None:
            return None
        return self.ready_nodes.get(_node(pod), False)

    def reading(self, pod: Manifest) -> Reading | None:
        """What a pod's worker said last."""
        return self.readings.get(pod["metadata"]["uid"])

    @property
    def hears_somebody(self) -> bool:
        """Whether any of the object's workers answers, so that the silence of others is theirs."""
        return any(found.has_answered and not found.is_lost for found in self.readings.values())


@dataclass(frozen=True)
class Sick:
    """A pod that should leave its node."""

    pod: Manifest
    cause: Cause
    reason: str
    """In words."""


@dataclass(frozen=True)
class Ending:
    """A quarantined pod that is to be deleted."""

    pod: Manifest
    grace_seconds: int | None
    """None: as long as the pod's own. 0: without waiting for the node."""
    reason: str


@dataclass(frozen=True)
class Switch:
    """A pod that was moved, as the status keeps it."""

    time: datetime
    pod: str
    node: str
    cause: str

    def document(self) -> dict[str, str]:
        """For the status."""
        return {
            "time": _stamp(self.time),
            "pod": self.pod,
            "node": self.node,
            "cause": self.cause,
        }


@dataclass(frozen=True)
class Decision:
    """What the ladder wants done."""

    quarantine: tuple[Sick, ...] = ()
    end: tuple[Ending, ...] = ()
    demand: str | None = None
    """Why a fallback should serve at once: level 2 is used up."""
    status: Mapping[str, Any] | None = None
    """`status.recovery`; None while nothing ever happened."""
    look_again_seconds: float | None = None


def trusted(ready_nodes: Mapping[str, bool]) -> Mapping[str, bool] | None:
    """What is known of the nodes; None when most are said to be lost at once.

    Then it is rather the control plane that cannot see them: Kubernetes itself evicts nothing.
    """
    lost = sum(not is_ready for is_ready in ready_nodes.values())
    if lost >= FEWEST_NODES_TO_DOUBT and 2 * lost > len(ready_nodes):
        return None
    return ready_nodes


def decide(case: Case) -> Decision:
    """One look at all pods of an object."""
    sick = sick_pods(case)
    known = recent_switches(case)
    chosen, wait_seconds = _affordable(case, sick, known)
    is_used_up = len(sick) > len(chosen) and len(known) + len(chosen) >= case.switches_per_hour
    demand = None
    if is_used_up:
        demand = (
            f"node switching is used up ({len(known) + len(chosen)} of {case.switches_per_hour} in"
            f" the last hour), and {sick[-1].reason}"
        )
        oldest = min((switch.time for switch in known), default=case.now)
        wait_seconds = max(1.0, (oldest + HOUR - case.now).total_seconds())
    end, end_wait = _endings(case)
    waits = [wait for wait in (wait_seconds, end_wait) if wait is not None]
    made = [_switch(case, one) for one in chosen]
    level = _level(case, is_used_up=is_used_up, is_switching=bool(sick or case.quarantined))
    if level == 1:
        waits.append(RETRYING_SECONDS)
    return Decision(
        quarantine=tuple(chosen),
        end=tuple(end),
        demand=demand,
        status=_status(case, [*known, *made], level, _why(case, sick, demand)),
        look_again_seconds=min(waits, default=None),
    )


def sick_pods(case: Case) -> list[Sick]:
    """The pods that should leave their node, the surest first."""
    found = []
    for pod in case.pods:
        if "deletionTimestamp" in pod["metadata"] or not _node(pod):
            continue
        sick = (
            _on_a_lost_node(case, pod)
            or _silent(case, pod)
            or _faulty(case, pod)
            or _restarting(pod)
        )
        if sick is not None:
            found.append(sick)
    return sorted(found, key=lambda sick: (CAUSES.index(sick.cause), sick.pod["metadata"]["name"]))


def recent_switches(case: Case) -> list[Switch]:
    """The pods that were moved in the last hour, the oldest first.

    A pod in quarantine counts even where the status was not written before a crash.
    """
    found = {switch.pod: switch for switch in _stored_switches(case.status)}
    for pod in case.quarantined:
        name = pod["metadata"]["name"]
        cause = (pod["metadata"].get("annotations") or {}).get(CAUSE_ANNOTATION)
        if cause not in CAUSES:
            # A person put the pod there.
            cause = "NodeSilent"
        found.setdefault(name, Switch(quarantined_at(pod, case.now), name, _node(pod), cause))
    # A time in the future is a clock that was set back: it must not block for ever.
    recent = [s for s in found.values() if case.now - HOUR < s.time <= case.now + HOUR]
    return sorted(recent, key=lambda switch: (switch.time, switch.pod))


def quarantined_at(pod: Manifest, now: datetime) -> datetime:
    """When a pod was quarantined."""
    text = (pod["metadata"].get("annotations") or {}).get(QUARANTINED_AT)
    return _time(text) or now


def quarantine_patch(
    sick: Sick, owner: Mapping[str, Any], dropped: Iterable[str], tier: str, now: datetime
) -> Manifest:
    """The merge patch that puts a pod into quarantine.

    Args:
        sick: The pod and why.
        owner: The ownerReference to the object: the ReplicaSet lets go of the pod, and nobody
            would collect it when the object is deleted.
        dropped: Labels that the Service and the ReplicaSet select by.
        tier: The pod's tier, for which a replacement has to come.
        now: The time of the decision.
    """
    return {
        "metadata": {
            "uid": sick.pod["metadata"]["uid"],
            "labels": {**dict.fromkeys(dropped), QUARANTINE_LABEL: owner["name"]},
            "annotations": {
                QUARANTINED_AT: _stamp(now),
                CAUSE_ANNOTATION: sick.cause,
                REASON_ANNOTATION: sick.reason[:512],
                TIER_ANNOTATION: tier,
            },
            "ownerReferences": [dict(owner)],
        }
    }


def anti_affinity(name: str) -> Manifest:
    """The term of the pod template that keeps replacements off the nodes of quarantined pods."""
    return {
        "labelSelector": {"matchLabels": {QUARANTINE_LABEL: name}},
        "topologyKey": "kubernetes.io/hostname",
    }


def pause_seconds(num_events: int) -> float:
    """The pause after the n-th event within an hour for which nodes were left (n >= 1)."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(num_events - 1, 10))


# Who is sick.


def _on_a_lost_node(case: Case, pod: Manifest) -> Sick | None:
    """The cluster itself says that the node is gone, and nothing speaks against it."""
    if case.node_is_ready(pod) is not False:
        return None
    reading = case.reading(pod)
    answers = reading is not None and reading.has_answered and not reading.is_lost
    if answers and is_ready(pod):
        return None
    return Sick(pod, "NodeSilent", f"node {_node(pod)} of pod {_name(pod)} is not ready")


def _silent(case: Case, pod: Manifest) -> Sick | None:
    """The worker answered and does not any more.

    One that never answered is judged only beside another one of the same object that does: what
    keeps the operator from asking, such as a policy, would keep it from both.
    """
    reading = case.reading(pod)
    if reading is None or not reading.is_lost or case.is_deaf:
        return None
    if not reading.has_answered and not (case.hears_somebody and is_ready(pod)):
        return None
    return Sick(
        pod,
        "NodeSilent",
        f"pod {_name(pod)} on node {_node(pod)} did not answer {reading.misses} times in a row"
        f" ({reading.sample.message})",
    )


def _faulty(case: Case, pod: Manifest) -> Sick | None:
    """The worker answers, and says that its device or its engine is broken."""
    reading = case.reading(pod)
    if reading is None or reading.sample.state is None:
        return None
    words = fault(reading.sample.state)
    if words is None:
        return None
    state = reading.sample.state
    cause: Cause = "DeviceFault"
    if state.phase != "failed":
        cause = "EngineStalled" if state.is_stalled else "MemoryExhausted"
    return Sick(pod, cause, f"pod {_name(pod)} on node {_node(pod)}: {words}")


def _restarting(pod: Manifest) -> Sick | None:
    """The worker ended again and again for its device, or for memory that somebody holds there."""
    for container in pod["status"].get("containers") or []:
        words = last_words(container)
        if (
            container.get("restartCount", 0) >= RESTARTS_ON_ONE_DEVICE
            and words is not None
            and words.reason in DEVICE_REASONS
        ):
            return Sick(
                pod,
                "DeviceFault",
                f"pod {_name(pod)} on node {_node(pod)} ended {container['restartCount']} times,"
                f" the last time by {words.reason}: {words.message}",
            )
    return None


# How many may be moved now.


def _affordable(
    case: Case, sick: list[Sick], known: list[Switch]
) -> tuple[list[Sick], float | None]:
    """Those of the sick that budget and pause allow, and after how long there may be more."""
    left = max(0, case.switches_per_hour - len(known))
    chosen: list[Sick] = []
    made = list(known)
    wait: float | None = None
    for one in sick:
        if len(chosen) >= left:
            break
        rest = _pause_left(case, one, made)
        if rest > 0:
            wait = rest if wait is None else min(wait, rest)
            continue
        chosen.append(one)
        made.append(_switch(case, one))
    return chosen, wait


def _pause_left(case: Case, one: Sick, made: list[Switch]) -> float:
    """Seconds until a pod may leave its node; 0 means now."""
    made = [
        switch
        for switch in made
        if switch.node != _node(one.pod)
        or (case.now - switch.time).total_seconds() >= SAME_EVENT_SECONDS
    ]
    if _is_certain_loss(case, one):
        if not has_run(one.pod):
            return 0.0
        made = [switch for switch in made if _may_replace(one.pod, switch)]
    if not made:
        return 0.0
    pause = pause_seconds(_num_events(made))
    # A clock that was set back does not lengthen the pause.
    passed = max(0.0, (case.now - max(switch.time for switch in made)).total_seconds())
    return max(0.0, pause - passed)


def _is_certain_loss(case: Case, one: Sick) -> bool:
    """Whether a pod's node is lost, and not only unheard by an operator that hears nobody.

    What a request or a model may have done to several workers, such as a stall, is no such loss.
    """
    if one.cause != "NodeSilent":
        return False
    return case.node_is_ready(one.pod) is False or case.hears_somebody


def _may_replace(pod: Manifest, switch: Switch) -> bool:
    """Whether a pod may have been made for one that was moved, and have its fault from it."""
    made_at = _time(pod["metadata"].get("creationTimestamp"))
    return made_at is None or made_at + timedelta(seconds=CLOCKS_APART_SECONDS) > switch.time


def _num_events(switches: list[Switch]) -> int:
    """How many faults it took to leave these nodes; those lost within one pause are one."""
    nodes: set[str] = set()
    last_loss: datetime | None = None
    number = 0
    for switch in sorted(switches, key=lambda switch: switch.time):
        is_loss = switch.cause == "NodeSilent"
        is_same_loss = (
            is_loss
            and last_loss is not None
            and (switch.time - last_loss).total_seconds() < FIRST_PAUSE_SECONDS
        )
        number += switch.node not in nodes and not is_same_loss
        nodes.add(switch.node)
        last_loss = switch.time if is_loss else last_loss
    return number


# What becomes of those in quarantine.


def _endings(case: Case) -> tuple[list[Ending], float | None]:
    found: list[Ending] = []
    wait: float | None = None
    for pod in case.quarantined:
        ending, again = _ending(case, pod)
        if ending is not None:
            found.append(ending)
        if again is not None:
            wait = again if wait is None else min(wait, again)
    return found, wait


def _ending(case: Case, pod: Manifest) -> tuple[Ending | None, float | None]:
    """Whether a quarantined pod goes now, and if not, after how long to look again."""
    is_silent, node_is_ready = _is_silent(case, pod), case.node_is_ready(pod)
    name = _name(pod)
    ends_at = pod["metadata"].get("deletionTimestamp")
    if ends_at is not None:
        overdue = (case.now - (_time(ends_at) or case.now)).total_seconds()
        is_lost = node_is_ready is False or (is_silent and node_is_ready is None)
        if overdue < OVERDUE_SECONDS or not is_lost:
            return None, OVERDUE_SECONDS
        return Ending(pod, 0, f"pod {name} does not end, and its node is lost"), None
    if node_is_ready is False:
        # The node's own taints keep the replacement away from it.
        return Ending(pod, 0, f"pod {name} is on a node that is lost"), None
    grace = SILENT_GRACE_SECONDS if is_silent else None
    if _is_replaced(case, pod):
        return Ending(pod, grace, f"the replacement of pod {name} is bound"), None
    patience = SILENT_PATIENCE_SECONDS if is_silent else PATIENCE_SECONDS
    age = (case.now - quarantined_at(pod, case.now)).total_seconds()
    if 0 <= age < patience:
        return None, patience - age
    return Ending(pod, grace, f"no other node takes the replacement of pod {name}"), None


def _is_silent(case: Case, pod: Manifest) -> bool:
    reading = case.reading(pod)
    if reading is not None:
        return reading.is_lost
    # It is not asked any more, or not yet by this process: what was seen then holds.
    annotations = pod["metadata"].get("annotations") or {}
    return bool(annotations.get(CAUSE_ANNOTATION) == "NodeSilent")


def _is_replaced(case: Case, pod: Manifest) -> bool:
    tier = (pod["metadata"].get("annotations") or {}).get(TIER_ANNOTATION, "")
    bound = sum(
        bool(_node(other)) and "deletionTimestamp" not in other["metadata"]
        for other in case.pods
        if case.tier_of.get(other["metadata"]["uid"]) == tier
    )
    return bound >= case.wanted.get(tier, 0)


# What the status says.


def _level(case: Case, *, is_used_up: bool, is_switching: bool) -> int:
    if is_used_up or case.is_degraded:
        return 3
    if is_switching:
        return 2
    since = case.now.timestamp() - RETRYING_SECONDS
    retried = (reading.retried_at for reading in case.readings.values())
    return int(any(at is not None and at > since for at in retried))


def new_switches(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Switch]:
    """The switches that the new status of an object tells of and the old one does not."""
    known = {switch.pod for switch in _stored_switches(old.get("recovery") or {})}
    found = _stored_switches(new.get("recovery") or {})
    return [switch for switch in found if switch.pod not in known]


def sentence_of(switch: Switch) -> str:
    """A switch in words."""
    why = _WORDS.get(switch.cause, "it failed")
    return f"Pod {switch.pod} left node {switch.node}, because {why}."


def was_used_up(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether level 3 was reached between two statuses for want of further switches."""
    before, now = old.get("recovery") or {}, new.get("recovery") or {}
    return bool(before.get("level", 0) < 3 <= now.get("level", 0) and "message" in now)


def _why(case: Case, sick: list[Sick], demand: str | None) -> str | None:
    if demand is not None:
        return _sentence(demand)
    if sick:
        return _sentence(sick[0].reason)
    for pod in case.quarantined:
        reason = (pod["metadata"].get("annotations") or {}).get(REASON_ANNOTATION)
        if reason:
            return _sentence(f"in quarantine: {reason}")
    return None


def _sentence(words: str) -> str:
    return sentence(words[0].upper() + words[1:])[:1024]


def _status(
    case: Case, switches: list[Switch], level: int, message: str | None
) -> Mapping[str, Any] | None:
    old = case.status
    known = {switch.pod for switch in _stored_switches(old)}
    retries = sum(reading.uncounted_retries for reading in case.readings.values())
    counts = {
        "batchRetries": _count(old.get("batchRetries")) + retries,
        "nodeSwitches": _count(old.get("nodeSwitches"))
        + sum(switch.pod not in known for switch in switches),
        "degradations": max(_count(old.get("degradations")), case.degradations),
    }
    if not old and not level and not any(counts.values()):
        return None
    new: dict[str, Any] = {"level": level, **counts}
    changed_at = old.get("lastChangeTime") if old.get("level", 0) == level else _stamp(case.now)
    if changed_at is not None:
        new["lastChangeTime"] = changed_at
    if message is not None:
        new["message"] = message
    if switches:
        new["switches"] = [switch.document() for switch in switches[-MAX_SWITCHES:]]
    return new


def _stored_switches(status: Mapping[str, Any]) -> list[Switch]:
    found = []
    for entry in status.get("switches") or []:
        time = _time(entry.get("time")) if isinstance(entry, dict) else None
        if time is not None:
            found.append(
                Switch(time, entry.get("pod", ""), entry.get("node", ""), entry.get("cause", ""))
            )
    return found


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _switch(case: Case, one: Sick) -> Switch:
    return Switch(case.now, _name(one.pod), _node(one.pod), one.cause)


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def _node(pod: Manifest) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _time(text: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return time if time is not None and time.tzinfo is not None else None


def _stamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
