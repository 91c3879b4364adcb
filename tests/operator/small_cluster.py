"""A cluster of a few GPUs in memory: Deployment controller, scheduler, kubelet, quota and clock.

It plays what the operator meets between one decision and the next, in steps of whole seconds, so
that a day of losing and finding capacity takes a second of testing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from scenes import NOW, Simulation, owner_of
from test_fleet import node as node_manifest

from deepseek_operator.fleet import Fleet
from deepseek_operator.kinds import DEPLOYMENT, Manifest
from deepseek_operator.observed import Observed
from deepseek_operator.plan import Plan, plan
from deepseek_operator.pods import is_ready, names_quota, refusal_of
from deepseek_operator.render import TIER_LABEL
from deepseek_operator.status import status_of

GPU = "nvidia.com/gpu"
START_SECONDS = 5
"""From being bound to answering."""
EVENT_SECONDS = 5
"""From a refused pod until its event is there."""
RESYNC_SECONDS = 300
"""The operator looks at everything so often, whatever it was told."""
DRAIN_SECONDS = 3
"""From being told to end until the units are free."""


def stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class SmallCluster(Simulation):
    """One object on nodes with whole GPUs."""

    gpus: dict[str, int] = field(default_factory=lambda: {"a": 2, "b": 2})
    """By node."""
    taken: dict[str, int] = field(default_factory=dict)
    """By node, GPUs that foreign pods hold."""
    quota: int | None = None
    """GPUs that the namespace may ask for."""
    taken_of_quota: int = 0
    first_refusal: str | None = None
    """Why the first of refused pods is refused, if it is not the quota: the Deployment says only
    that, and of the quota only events tell, which wake nobody."""
    refused: set[str] = field(default_factory=set)
    """Tiers whose pods an admission policy refuses."""
    is_visible: bool = True
    """Whether the operator may see nodes."""
    broken: set[str] = field(default_factory=set)
    """Tiers whose pods never answer."""
    too_large: set[str] = field(default_factory=set)
    """Tiers whose worker says that its model does not fit."""
    pin: str | None = None
    operator_is_ahead: timedelta = timedelta()
    """By how much the operator's clock is ahead of everybody else's."""
    ready_log: list[int] = field(default_factory=list)
    """Pods that answered, after each second."""
    _seen: str = ""
    _due: datetime = NOW
    _names: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _bound_at: dict[str, datetime] = field(default_factory=dict)
    _ends_at: dict[str, datetime] = field(default_factory=dict)

    # The operator.

    def observed(self) -> Observed:
        seen = super().observed()
        owner = owner_of(
            self.document, name=self.name, generation=self.generation, status=self.status
        )
        if self.pin is not None:
            owner["metadata"]["annotations"] = {"deepseek.dev/pin": self.pin}
        return replace(
            seen,
            owner=owner,
            fleet=self.fleet() if self.is_visible else None,
            pod_refusals=self._told_by_events(),
        )

    def fleet(self) -> Fleet:
        fleet = Fleet()
        fleet.is_known = True
        for name, number in self.gpus.items():
            fleet.notice_node(None, node_manifest(name, gpus=number))
            if self.taken.get(name):
                fleet.notice_pod(None, _foreign(name, self.taken[name]))
        for pod in self.pods:
            spec = {
                "nodeName": pod["spec"].get("nodeName"),
                "containers": [{"resources": {"requests": {GPU: str(self._gpus_of(pod))}}}],
            }
            fleet.notice_pod(None, {**pod, "spec": spec})
        return fleet

    def plan(self) -> Plan:
        return plan(self.spec, self.observed(), self.settings, self.now + self.operator_is_ahead)

    def reconcile(self) -> Plan:
        todo = self.plan()
        self.carry_out(todo)
        now = self.now + self.operator_is_ahead
        self.status = status_of(self.spec, self.observed(), todo, [], now)
        return todo

    # Everybody else.

    def second(self) -> bool:
        """One second: the operator acts on news or when it asked to be woken, then all others.

        Returns:
            Whether anybody did anything.
        """
        is_awake = self._picture() != self._seen or self.now >= self._due
        if is_awake:
            todo = self.reconcile()
            again = todo.requeue_after_seconds
            self._due = self.now + timedelta(seconds=min(again or RESYNC_SECONDS, RESYNC_SECONDS))
            self._seen = "" if not todo.is_empty else self._picture()
        before = self._picture()
        self.others()
        self.now += timedelta(seconds=1)
        self.ready_log.append(self.num_ready())
        return is_awake or self._picture() != before

    def run(self, seconds: int) -> None:
        end = self.now + timedelta(seconds=seconds)
        while self.now < end:
            if not self.second():
                self._sleep(end)

    def until(self, reason: str, seconds: int = 600) -> int:
        """Run until Degraded has this reason, and return after how many seconds it had."""
        start = self.now
        end = start + timedelta(seconds=seconds)
        while self.degraded != reason:
            if self.now >= end:
                raise AssertionError(f"{self.degraded}, never {reason}: {self.message}")
            if not self.second():
                self._sleep(end)
        return int((self.now - start).total_seconds())

    def _sleep(self, end: datetime) -> None:
        """Jump over seconds in which nothing would happen."""
        started = (moment + timedelta(seconds=START_SECONDS) for moment in self._bound_at.values())
        due = [t for t in (self._due, *started, *self._ends_at.values()) if t >= self.now]
        seconds = int((min(end, *due) - self.now).total_seconds())
        self.now += timedelta(seconds=seconds)
        self.ready_log += [self.num_ready()] * seconds

    def _picture(self) -> str:
        """All that the operator is told of, as text."""
        owner = (
            self.document,
            self.pin,
            self.generation,
            self.status.get("degrade"),
            not self.status,
        )
        fleet = (self.gpus, self.taken) if self.is_visible else ()
        live = [
            (key.name, live["metadata"]["resourceVersion"], live.get("status"))
            for key, live in self.objects.items()
        ]
        return repr((owner, fleet, self.pods, live, self.quota, self.taken_of_quota, self.broken))

    @property
    def condition(self) -> dict[str, Any]:
        return self.said_of("Degraded")

    def said_of(self, kind: str) -> dict[str, Any]:
        """The condition of this type."""
        conditions = self.status.get("conditions") or []
        return next((entry for entry in conditions if entry["type"] == kind), {})

    @property
    def degraded(self) -> str:
        return str(self.condition.get("reason"))

    @property
    def message(self) -> str:
        return str(self.condition.get("message"))

    def tiers(self) -> dict[str, int]:
        """Pods asked for by tier."""
        return {
            live["metadata"]["labels"][TIER_LABEL]: live["spec"]["replicas"]
            for key, live in self.objects.items()
            if key.kind == DEPLOYMENT.kind
        }

    def num_ready(self, tier: str | None = None) -> int:
        return sum(
            is_ready(pod)
            for pod in self.pods
            if tier is None or pod["metadata"]["labels"][TIER_LABEL] == tier
        )

    def others(self) -> None:
        self._end_pods()
        self._control_deployments()
        self._schedule()
        self._start_pods()
        self._count()

    def _end_pods(self) -> None:
        self.pods = [
            pod
            for pod in self.pods
            if self._ends_at.get(pod["metadata"]["name"], self.now + timedelta(1)) > self.now
        ]

    def _control_deployments(self) -> None:
        deployments = {
            live["metadata"]["labels"][TIER_LABEL]: live
            for key, live in self.objects.items()
            if key.kind == DEPLOYMENT.kind
        }
        for pod in self.pods:
            if pod["metadata"]["labels"][TIER_LABEL] not in deployments:
                self._terminate(pod)
        for tier, live in deployments.items():
            mine = [pod for pod in self._of(tier) if "deletionTimestamp" not in pod["metadata"]]
            # As the controller does: pods without a node go first, then those that do not answer.
            mine.sort(key=lambda pod: ("nodeName" in pod["spec"], is_ready(pod)))
            for pod in mine[: max(0, len(mine) - live["spec"]["replicas"])]:
                self._terminate(pod)
            refused = False
            for _ in range(live["spec"]["replicas"] - len(mine)):
                refused = refused or not self._create(tier, live)
            self._say_refused(live, refused)

    def _say_refused(self, live: Manifest, refused: bool) -> None:
        status = live.setdefault("status", {})
        if not refused:
            status["conditions"] = []
        elif not status.get("conditions"):
            status["conditions"] = [
                {
                    "type": "ReplicaFailure",
                    "status": "True",
                    "message": self.first_refusal or self._refusal(live),
                    "lastTransitionTime": stamp(self.now),
                }
            ]

    def _refusal(self, live: Manifest) -> str:
        if live["metadata"]["labels"][TIER_LABEL] in self.refused:
            return 'pods "x" is forbidden: ValidatingAdmissionPolicy "gate" denied request: no.'
        return self._over_quota(live)

    def _over_quota(self, live: Manifest) -> str:
        asked, used = self._gpus_of_template(live), self._used_of_quota()
        return (
            f'pods "x" is forbidden: exceeded quota: gpus, requested: requests.{GPU}={asked},'
            f" used: requests.{GPU}={used}, limited: requests.{GPU}={self.quota}"
        )

    def _told_by_events(self) -> dict[str, str]:
        """Why pods are refused now, from some seconds after the first one was."""
        shown = stamp(self.now - timedelta(seconds=EVENT_SECONDS))
        return {
            key.name: self._refusal(live)
            for key, live in self.objects.items()
            if key.kind == DEPLOYMENT.kind
            and (condition := refusal_of(live)) is not None
            and not names_quota(condition["message"])
            and condition["lastTransitionTime"] <= shown
        }

    def _create(self, tier: str, live: Manifest) -> bool:
        number = self._gpus_of_template(live)
        if tier in self.refused:
            return False
        if self.quota is not None and self._used_of_quota() + number > self.quota:
            return False
        template = live["spec"]["template"]["metadata"]
        self.pods.append(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{self.name}-{tier}-{next(self._names)}",
                    "namespace": "team",
                    "uid": f"pod-{next(self._names)}",
                    "resourceVersion": "1",
                    "labels": dict(template["labels"]),
                    "annotations": dict(template["annotations"]),
                    "creationTimestamp": stamp(self.now),
                },
                "spec": {
                    "gpus": number,
                    "containers": live["spec"]["template"]["spec"]["containers"],
                },
                "status": {"phase": "Pending", "conditions": [self._said("Ready", "False")]},
            }
        )
        return True

    def _terminate(self, pod: Manifest) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        pod["metadata"]["deletionTimestamp"] = stamp(self.now + timedelta(seconds=43))
        name = pod["metadata"]["name"]
        is_running = "nodeName" in pod["spec"]
        self._ends_at[name] = self.now + timedelta(seconds=DRAIN_SECONDS if is_running else 0)

    def _schedule(self) -> None:
        for pod in self.pods:
            if "nodeName" in pod["spec"] or "deletionTimestamp" in pod["metadata"]:
                continue
            place = next(
                (name for name in sorted(self.gpus) if self.free(name) >= self._gpus_of(pod)), None
            )
            conditions = pod["status"]["conditions"]
            if place is not None:
                pod["spec"]["nodeName"] = place
                pod["status"]["conditions"] = [c for c in conditions if c["type"] == "Ready"]
                self._bound_at[pod["metadata"]["name"]] = self.now
            elif len(conditions) == 1:
                words = f"0/{len(self.gpus)} nodes are available: Insufficient {GPU}."
                said = self._said("PodScheduled", "False", reason="Unschedulable", message=words)
                conditions.append(said)

    def _start_pods(self) -> None:
        for pod in self.pods:
            name, tier = pod["metadata"]["name"], pod["metadata"]["labels"][TIER_LABEL]
            started = self._bound_at.get(name)
            if started is None or "deletionTimestamp" in pod["metadata"]:
                continue
            pod["status"]["phase"] = "Running"
            is_due = self.now >= started + timedelta(seconds=START_SECONDS)
            wanted = "True" if is_due and tier not in self.broken | self.too_large else "False"
            if pod["status"]["conditions"][0]["status"] != wanted:
                pod["status"]["conditions"][0] = self._said("Ready", wanted)
            if tier in self.too_large and is_due:
                told = '{"reason": "ModelTooLarge", "message": "It needs 99 GiB."}'
                pod["status"]["containers"] = [
                    {
                        "name": "worker",
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 1, "message": told}},
                    }
                ]

    def _count(self) -> None:
        for key, live in self.objects.items():
            if key.kind == DEPLOYMENT.kind:
                tier = live["metadata"]["labels"][TIER_LABEL]
                mine = [p for p in self._of(tier) if "deletionTimestamp" not in p["metadata"]]
                ready = sum(map(is_ready, mine))
                live.setdefault("status", {}).update(
                    observedGeneration=live["metadata"]["generation"],
                    replicas=len(mine),
                    updatedReplicas=len(mine),
                    readyReplicas=ready,
                    availableReplicas=ready,
                )

    def free(self, name: str) -> int:
        used = sum(self._gpus_of(pod) for pod in self.pods if pod["spec"].get("nodeName") == name)
        return self.gpus[name] - used - self.taken.get(name, 0)

    def _of(self, tier: str) -> list[Manifest]:
        return [pod for pod in self.pods if pod["metadata"]["labels"][TIER_LABEL] == tier]

    def _used_of_quota(self) -> int:
        return self.taken_of_quota + sum(self._gpus_of(pod) for pod in self.pods)

    def _gpus_of(self, pod: Manifest) -> int:
        return int(pod["spec"]["gpus"])

    def _gpus_of_template(self, live: Manifest) -> int:
        (container,) = live["spec"]["template"]["spec"]["containers"]
        return int(container["resources"].get("requests", {}).get(GPU, 0))

    def _said(self, kind: str, value: str, **more: str) -> dict[str, str]:
        return {"type": kind, "status": value, "lastTransitionTime": stamp(self.now), **more}


def _foreign(node: str, number: int) -> Manifest:
    return {
        "metadata": {"name": f"foreign-{node}", "namespace": "other"},
        "spec": {
            "nodeName": node,
            "containers": [{"resources": {"requests": {GPU: str(number)}}}],
        },
        "status": {"phase": "Running"},
    }
