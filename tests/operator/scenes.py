"""Builders of what the operator sees: objects, pods, and a cluster that applies plans."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_operator.devices import Supply
from deepseek_operator.kinds import DEPLOYMENT, JOB, SECRET, Manifest, Reference, reference
from deepseek_operator.loader import MODEL_LABEL
from deepseek_operator.observed import Observed
from deepseek_operator.plan import Plan, plan
from deepseek_operator.quota import PodLimit
from deepseek_operator.render import TOKEN_KEY, foreign_claims, selector
from deepseek_operator.settings import Settings
from deepseek_operator.status import status_of
from deepseek_operator.views import view

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
SETTINGS = Settings()
CPU = {"gpu": {"mode": "cpu"}}
HUB = {"model": {"source": "hf://org/tiny@main"}} | CPU
CHECKSUM = "a" * 64


def spec_of(document: dict[str, Any] | None = None) -> DeepSeekDeploymentSpec:
    return DeepSeekDeploymentSpec.parse(CPU if document is None else document)


def owner_of(
    document: dict[str, Any] | None = None,
    *,
    name: str = "chat",
    namespace: str = "team",
    generation: int = 1,
    status: dict[str, Any] | None = None,
) -> Manifest:
    return {
        "apiVersion": "deepseek.dev/v1alpha1",
        "kind": "DeepSeekDeployment",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-of-{name}",
            "generation": generation,
            "resourceVersion": "1",
        },
        "spec": spec_of(document).document(),
        "status": status or {},
    }


def pod_of(
    name: str = "chat-primary-1",
    *,
    ready: bool = False,
    conditions: list[dict[str, Any]] | None = None,
    containers: list[dict[str, Any]] | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    node: str | None = None,
    phase: str = "Pending",
    deleting: bool = False,
) -> Manifest:
    metadata: Manifest = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-of-{name}",
        "resourceVersion": "1",
        "labels": labels or selector("chat", "primary"),
        "annotations": annotations or {},
    }
    if deleting:
        metadata["deletionTimestamp"] = "2026-05-01T12:00:00Z"
    status: Manifest = {
        "phase": "Running" if ready else phase,
        "conditions": [
            *(conditions or []),
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
        "containers": containers or [],
    }
    spec = {"nodeName": node} if node else {}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status,
    }  # fmt: skip


def claim(phase: str = "Bound", modes: tuple[str, ...] = ("ReadWriteOnce",)) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights", "namespace": "team", "uid": "uid-of-weights"},
        "spec": {"accessModes": list(modes)},
        "status": {"phase": phase},
    }


def unschedulable(message: str = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.") -> Any:
    return [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
        }
    ]


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"name": "worker", "state": {"waiting": {"reason": reason, "message": message}}}


def ended(message: str, *, exit_code: int = 1, reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}


@dataclass
class Simulation:
    """The API server as far as plans go: stores what is applied, gives uids and versions."""

    document: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(CPU))
    settings: Settings = SETTINGS
    name: str = "chat"
    objects: dict[Reference, Manifest] = field(default_factory=dict)
    pods: list[Manifest] = field(default_factory=list)
    loader_pods: list[Manifest] = field(default_factory=list)
    quarantined: list[Manifest] = field(default_factory=list)
    foreign_claim: Manifest | None = None
    missing_secrets: tuple[str, ...] = ()
    supply: Supply | None = None
    limits: dict[str, PodLimit] = field(default_factory=dict)
    readings: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    generation: int = 1
    now: datetime = NOW
    _counter: Any = field(default_factory=lambda: itertools.count(2))

    @property
    def spec(self) -> DeepSeekDeploymentSpec:
        return spec_of(self.document)

    def observed(self) -> Observed:
        owner = owner_of(
            self.document, name=self.name, generation=self.generation, status=self.status
        )
        labelled = {
            key: MODEL_LABEL in (live["metadata"].get("labels") or {})
            for key, live in self.objects.items()
        }
        return Observed(
            owner=owner,
            children={key: self.objects[key] for key, cached in labelled.items() if not cached},
            cache={key: self.objects[key] for key, cached in labelled.items() if cached},
            pods=tuple(self.pods),
            quarantined=tuple(self.quarantined),
            loader_pods=tuple(self.loader_pods),
            foreign_claims=(
                dict.fromkeys(foreign_claims(self.spec), self.foreign_claim)
                if self.foreign_claim
                else {}
            ),
            missing_secrets=self.missing_secrets,
            supply=self.supply,
            limits=self.limits,
            readings=self.readings,
        )

    def plan(self) -> Plan:
        return plan(self.spec, self.observed(), self.settings, self.now)

    def reconcile(self) -> Plan:
        """One round: plan, carry out, write the status."""
        todo = self.plan()
        self.carry_out(todo)
        self.status = status_of(self.spec, self.observed(), todo, [], self.now)
        return todo

    def settle(self) -> None:
        """Reconcile until nothing is left to do."""
        for _ in range(6):
            if self.reconcile().is_empty:
                return
        raise AssertionError(f"never settles: {self.plan().reasons}")

    def carry_out(self, todo: Plan) -> None:
        for manifest in (*todo.apply, *todo.create):
            self.store(manifest)
        for live in todo.delete:
            self.objects.pop(reference(live), None)

    def store(self, manifest: Manifest) -> None:
        key = reference(manifest)
        live = self.objects.get(key)
        metadata = dict(manifest["metadata"])
        old = live["metadata"] if live is not None else {}
        metadata["uid"] = old.get("uid", f"uid-{next(self._counter)}")
        metadata["resourceVersion"] = str(next(self._counter))
        changed = live is None or live.get("spec") != manifest.get("spec")
        metadata["generation"] = old.get("generation", 0) + int(changed)
        stored = {**copy.deepcopy(manifest), "metadata": metadata}
        if live is not None and "status" in live:
            stored["status"] = live["status"]
        if key.kind == SECRET.kind:
            stored["data"] = {TOKEN_KEY: "c2VjcmV0"}
        self.objects[key] = view(stored)

    def child(self, kind: str, name: str) -> Manifest:
        return self.objects[Reference(kind, "team", name)]

    @property
    def deployment(self) -> Manifest:
        return self.child(DEPLOYMENT.kind, f"{self.name}-primary")

    def roll_out(self, **counts: Any) -> None:
        """Play the Deployment controller: all pods are current and answer, unless told else."""
        live = self.deployment
        replicas = live["spec"]["replicas"]
        live["status"] = {
            "observedGeneration": live["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": replicas,
            "availableReplicas": replicas,
        } | counts

    def finish_job(self, condition: str, *, at: datetime | None = None) -> Manifest:
        """Play the Job controller for the latest job: `Complete` or `Failed`."""
        job = max(
            (live for key, live in self.objects.items() if key.kind == JOB.kind),
            key=lambda live: int(live["metadata"]["resourceVersion"]),
        )
        moment = (at or self.now).strftime("%Y-%m-%dT%H:%M:%SZ")
        job["status"] = {
            "conditions": [{"type": condition, "status": "True", "lastTransitionTime": moment}]
        }
        return job


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(entry for entry in status["conditions"] if entry["type"] == kind)
