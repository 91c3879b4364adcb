"""How many pods a tier has: one writer at a time, and a condition that says why not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from real import Server, eventually
from scenes import NOW, SETTINGS, Simulation, condition, pod_of, spec_of
from test_controller import kubelet, quiet, reason

from cluster import programs
from conftest import Start
from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_operator.autoscale import (
    ExternalMetrics,
    ScaledTier,
    autoscaler,
    external_metrics,
    is_obstructed,
    load_seconds,
    scaling_state,
    with_replicas,
)
from deepseek_operator.kinds import (
    AUTOSCALER,
    DEEPSEEK_DEPLOYMENT,
    DEPLOYMENT,
    SCALED_OBJECT,
    Manifest,
    Reference,
)
from deepseek_operator.quota import PodLimit
from deepseek_operator.render import Owner
from deepseek_operator.status import Refusal, notes, status_of
from deepseek_operator.tiers import Tier, tiers_of
from deepseek_operator.views import view

OWNER = Owner("team", "chat", "uid-of-chat")
CPU = {"gpu": {"mode": "cpu"}}
KEDA = SETTINGS.model_copy(update={"keda": True})
ADAPTER = ExternalMetrics(True, "monitoring/prometheus-adapter")
KEDAS = ExternalMetrics(True, "keda/keda-operator-metrics-apiserver")


def tier_of(replicas: int = 1, **scaling: Any) -> Tier:
    document: dict[str, Any] = CPU | {"replicas": replicas}
    if scaling:
        document["autoscaling"] = {"maxReplicas": 5} | scaling
    return tiers_of(spec_of(document))[0]


def scaled(**fields: Any) -> ScaledTier:
    """A tier under an HPA from 1 to 5, with what is there of it."""
    return replace(ScaledTier(OWNER, tier_of(provider="hpa"), external_metrics=ADAPTER), **fields)


def deployment(replicas: int, *managers: str) -> Manifest:
    """A live Deployment whose `replicas` these managers own."""
    entries = [
        {
            "manager": manager,
            "operation": "Apply" if manager == "deepseek-operator" else "Update",
            "fieldsV1": {"f:spec": {"f:replicas": {}}},
        }
        for manager in managers
    ]
    metadata = {
        "name": "chat-primary",
        "namespace": "team",
        "uid": "uid-of-deployment",
        "resourceVersion": "7",
        "managedFields": [
            *entries,
            {"manager": "kube-controller-manager", "fieldsV1": {"f:status": {"f:replicas": {}}}},
        ],
    }
    return view(
        {
            "apiVersion": "apps/v1",
            "kind": DEPLOYMENT.kind,
            "metadata": metadata,
            "spec": {"replicas": replicas},
        }
    )


def live_autoscaler(
    *, desired: int = 1, kind: str = AUTOSCALER.kind, **conditions: tuple[str, str, str]
) -> Manifest:
    return view(
        {
            "apiVersion": "autoscaling/v2",
            "kind": kind,
            "metadata": {"name": "chat-primary", "namespace": "team", "uid": "uid-of-scaler"},
            "spec": {},
            "status": {
                "desiredReplicas": desired,
                "conditions": [
                    {"type": name, "status": status, "reason": reason, "message": message}
                    for name, (status, reason, message) in conditions.items()
                ],
            },
        }
    )


def applied_replicas(tier: ScaledTier) -> tuple[int | None, str | None]:
    """What an apply would say: replicas, and the only version it would be said of."""
    manifest = {"metadata": {"name": "chat-primary"}, "spec": {"selector": {}}}
    sent = with_replicas(manifest, tier)
    assert manifest == {"metadata": {"name": "chat-primary"}, "spec": {"selector": {}}}
    return sent["spec"].get("replicas"), sent["metadata"].get("resourceVersion")


class TestOneWriter:
    """Cases A01 and B05: the operator never undoes what an autoscaler has set."""

    def test_where_nothing_scales_the_spec_s_number_is_applied(self) -> None:
        fixed = ScaledTier(OWNER, tier_of(replicas=4))

        assert applied_replicas(fixed) == (4, None)
        assert applied_replicas(
            replace(fixed, deployment=deployment(9, "deepseek-operator", "kubectl"))
        ) == (4, None)

    def test_a_new_deployment_starts_with_the_fewest_pods(self) -> None:
        assert applied_replicas(scaled(tier=tier_of(minReplicas=2))) == (2, None)

    def test_a_deployment_that_was_lost_comes_back_with_what_its_autoscaler_wants(self) -> None:
        assert applied_replicas(scaled(autoscaler=live_autoscaler(desired=4))) == (4, None)
        assert applied_replicas(scaled(autoscaler=live_autoscaler(desired=40))) == (5, None)

    def test_an_owned_count_is_sent_as_it_is_and_for_its_version_only(self) -> None:
        """To leave an owned field out would reset it to 1."""
        live = deployment(3, "deepseek-operator")

        assert applied_replicas(scaled(deployment=live)) == (3, "7")

    @pytest.mark.parametrize("others", [["kube-controller-manager"], ["keda", "kubectl"]])
    def test_a_count_that_another_owns_is_left_out(self, others: list[str]) -> None:
        assert applied_replicas(scaled(deployment=deployment(3, *others))) == (None, None)
        both = deployment(3, "deepseek-operator", *others)
        assert applied_replicas(scaled(deployment=both)) == (None, None)

    def test_nothing_is_no_count_to_scale_from(self) -> None:
        """An HPA does not touch a Deployment of 0 replicas."""
        live = deployment(0, "deepseek-operator", "kubectl")

        assert applied_replicas(scaled(deployment=live, tier=tier_of(minReplicas=2))) == (2, "7")

    def test_a_provider_of_somebody_s_own_may_scale_to_nothing(self) -> None:
        left = scaled(tier=tier_of(provider="none"), deployment=deployment(0, "knative"))

        assert applied_replicas(left) == (None, None)
        assert left.wanted_replicas == 0

    def test_when_autoscaling_ends_the_autoscaler_goes_before_the_count_is_set(self) -> None:
        live = deployment(3, "kube-controller-manager")
        ending = ScaledTier(OWNER, tier_of(), deployment=live, autoscaler=live_autoscaler())

        assert ending.superfluous
        assert applied_replicas(ending) == (None, None)
        assert applied_replicas(replace(ending, autoscaler=None)) == (1, None)

    def test_somebody_else_s_autoscaler_is_not_fought(self) -> None:
        fixed = ScaledTier(OWNER, tier_of(replicas=2), deployment=deployment(4, "hpa"))

        assert applied_replicas(replace(fixed, foreign=("theirs",))) == (None, None)
        assert applied_replicas(fixed) == (2, None)

    def test_a_tier_that_is_to_have_no_pods_has_none_whoever_scales(self) -> None:
        down = tier_of(minReplicas=2).with_replicas(0)
        live = deployment(3, "kube-controller-manager")

        first = scaled(tier=down, deployment=live, autoscaler=live_autoscaler())
        then = replace(first, autoscaler=None)

        assert first.superfluous
        assert autoscaler(first, SETTINGS) is None
        assert applied_replicas(first) == (None, None)
        assert applied_replicas(then) == (0, None)


class TestLimit:
    """A tenant's share that has room for fewer pods."""

    def test_the_autoscaler_is_told_at_once_what_will_be_left(self) -> None:
        limit = PodLimit(now=4, soon=2, message="")
        manifest = autoscaler(scaled(tier=tier_of(minReplicas=3).within(limit)), SETTINGS)

        assert manifest is not None
        assert (manifest["spec"]["minReplicas"], manifest["spec"]["maxReplicas"]) == (2, 2)

    def test_without_any_room_the_autoscaler_goes_before_the_pods(self) -> None:
        nothing = tier_of().within(PodLimit(now=0, soon=0, message=""))
        live = deployment(3, "kube-controller-manager")
        tier = scaled(tier=nothing, deployment=live, autoscaler=live_autoscaler())

        assert autoscaler(tier, SETTINGS) is None
        assert tier.superfluous
        assert applied_replicas(tier) == (None, None)
        assert applied_replicas(replace(tier, autoscaler=None)) == (0, None)


class TestHorizontalPodAutoscaler:
    def test_it_scales_the_tier_s_deployment_by_memory_and_by_waiting_requests(self) -> None:
        manifest = autoscaler(
            scaled(tier=tier_of(gpuMemoryPercent=70, queuedRequestsPerReplica=3)), SETTINGS
        )

        assert manifest is not None
        assert manifest["metadata"]["name"] == "chat-primary"
        assert manifest["metadata"]["labels"]["deepseek.dev/tier"] == "primary"
        spec = manifest["spec"]
        assert spec["scaleTargetRef"] == {
            "apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-primary",
        }  # fmt: skip
        assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 5)
        labels = {"matchLabels": {"deployment": "chat", "tier": "primary"}}
        assert [metric["external"] for metric in spec["metrics"]] == [
            {
                "metric": {"name": "deepseek_gpu_memory_demand_percent", "selector": labels},
                "target": {"type": "AverageValue", "averageValue": "70"},
            },
            {
                "metric": {"name": "deepseek_requests_waiting", "selector": labels},
                "target": {"type": "AverageValue", "averageValue": "3"},
            },
        ]

    @pytest.mark.parametrize("name", ["used", "nvidia.com/gpu_memory_used_percent"])
    def test_a_name_with_a_slash_becomes_one_that_an_hpa_takes(self, name: str) -> None:
        manifest = autoscaler(scaled(tier=tier_of(metric=name)), SETTINGS)

        assert manifest is not None
        metric = manifest["spec"]["metrics"][0]["external"]["metric"]["name"]
        assert metric == "deepseek_gpu_memory_used_percent"

    def test_without_a_tolerance_the_surge_of_a_rollout_is_no_reason_to_scale(self) -> None:
        manifest = autoscaler(scaled(), SETTINGS)

        assert manifest is not None
        assert manifest["spec"]["behavior"] == {
            "scaleUp": {"stabilizationWindowSeconds": 0, "tolerance": "0"},
            "scaleDown": {"stabilizationWindowSeconds": 300, "tolerance": "0"},
        }

    def test_what_a_person_says_of_the_behaviour_counts(self) -> None:
        down = {
            "stabilizationWindowSeconds": 10,
            "selectPolicy": "Min",
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
        }
        manifest = autoscaler(scaled(tier=tier_of(behavior={"scaleDown": down})), SETTINGS)

        assert manifest is not None
        assert manifest["spec"]["behavior"]["scaleDown"] == {"tolerance": "0"} | down
        assert manifest["spec"]["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 0

    @pytest.mark.parametrize(
        ("seconds", "window"), [(20, 300), (300, 300), (301, 360), (1700, 1740)]
    )
    def test_pods_are_kept_at_least_as_long_as_one_takes_to_load(
        self, seconds: int, window: int
    ) -> None:
        manifest = autoscaler(scaled(pods=(started(seconds),)), SETTINGS)

        assert manifest is not None
        down = manifest["spec"]["behavior"]["scaleDown"]
        assert down["stabilizationWindowSeconds"] == window

    def test_there_is_none_where_nobody_asks_for_one(self) -> None:
        assert autoscaler(ScaledTier(OWNER, tier_of()), SETTINGS) is None
        assert autoscaler(scaled(tier=tier_of(provider="none")), SETTINGS) is None


class TestLoadTime:
    def test_the_quickest_pod_counts(self) -> None:
        assert load_seconds((started(50), started(40), started(3000))) == 40

    def test_readiness_that_came_back_after_hours_is_no_start(self) -> None:
        assert load_seconds((started(9000),)) is None

    def test_pods_that_do_not_answer_say_nothing(self) -> None:
        assert load_seconds(()) is None
        assert load_seconds((pod_of(), pod_of(ready=True))) is None


def started(seconds: int) -> Manifest:
    """A pod that answered this long after its start."""
    pod = pod_of(
        containers=[{"name": "worker", "state": {"running": {"startedAt": "2026-05-01T12:00:00Z"}}}]
    )
    moment = f"2026-05-01T{12 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"
    pod["status"]["conditions"] = [
        {"type": "Ready", "status": "True", "lastTransitionTime": moment}
    ]
    return pod


class TestScaledObject:
    def test_keda_asks_prometheus_for_the_sum_over_the_tier_s_pods(self) -> None:
        tier = scaled(tier=tier_of(provider="keda", minReplicas=2, gpuMemoryPercent=60))

        manifest = autoscaler(tier, KEDA)

        assert manifest is not None
        assert manifest["apiVersion"] == "keda.sh/v1alpha1"
        spec = manifest["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 5)
        memory, queue = spec["triggers"]
        assert memory["metricType"] == "AverageValue"
        assert memory["metadata"]["threshold"] == "60"
        assert queue["metadata"]["threshold"] == "8"
        matchers = '{namespace="team",deployment="chat",tier="primary"}'
        assert memory["metadata"]["query"] == (
            "sum(max by (pod) (last_over_time(deepseek_gpu_memory_demand_percent"
            f"{matchers}[1m]) and on (namespace, pod) up{matchers}))"
        )
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 300

    def test_no_series_is_not_taken_for_no_load(self) -> None:
        manifest = autoscaler(scaled(tier=tier_of(provider="keda")), KEDA)

        assert manifest is not None
        for trigger in manifest["spec"]["triggers"]:
            assert trigger["metadata"]["ignoreNullValues"] == "false"

    def test_there_is_none_where_keda_is_not_installed(self) -> None:
        assert autoscaler(scaled(tier=tier_of(provider="keda")), SETTINGS) is None

    @pytest.mark.parametrize(("old", "new"), [("hpa", "keda"), ("keda", "hpa")])
    def test_a_new_provider_waits_until_the_old_one_s_autoscaler_is_gone(
        self, old: str, new: str
    ) -> None:
        """KEDA's webhook refuses a target that has an autoscaler."""
        live = live_autoscaler()
        kept = {"autoscaler": live} if old == "hpa" else {"scaled_object": live}
        tier = scaled(tier=tier_of(provider=new), deployment=deployment(3, "hpa"), **kept)

        assert tier.superfluous == (live,)
        assert autoscaler(tier, KEDA) is None
        assert applied_replicas(tier) == (None, None)
        gone = replace(tier, autoscaler=None, scaled_object=None)
        assert autoscaler(gone, KEDA) is not None

    def test_one_that_hangs_in_its_finalizer_holds_up_nothing(self) -> None:
        live = live_autoscaler(kind=SCALED_OBJECT.kind)
        live["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"
        tier = scaled(scaled_object=live)

        assert not tier.superfluous
        assert autoscaler(tier, KEDA) is not None


GOOD = {
    "AbleToScale": ("True", "ReadyForNewScale", "recommended size matches current size"),
    "ScalingActive": ("True", "ValidMetricFound", "the HPA was able to compute"),
    "ScalingLimited": ("False", "DesiredWithinRange", "in range"),
}
NO_SERIES = ("False", "FailedGetExternalMetric", "no metrics returned from external metrics API")
READY = (pod_of(ready=True),)


class TestCondition:
    def state(self, tier: ScaledTier, settings: Any = SETTINGS) -> tuple[str, str, str]:
        found = scaling_state(tier, settings)
        return found.status, found.reason, found.message

    def test_a_fixed_count_is_the_spec_s(self) -> None:
        assert self.state(ScaledTier(OWNER, tier_of()))[:2] == ("False", "FixedReplicas")

    def test_an_autoscaler_that_works_tells_what_it_wants(self) -> None:
        status, reason, message = self.state(
            scaled(pods=READY, autoscaler=live_autoscaler(desired=3, **GOOD))
        )

        assert (status, reason) == ("True", "Scaling")
        assert "from 1 to 5; it wants 3 now" in message

    def test_a_limit_that_holds_it_back_is_told(self) -> None:
        limited = GOOD | {"ScalingLimited": ("True", "TooManyReplicas", "more than the maximum")}

        message = self.state(scaled(autoscaler=live_autoscaler(desired=5, **limited)))[2]

        assert "would want more if maxReplicas allowed it" in message

    def test_one_that_has_not_looked_yet_is_starting(self) -> None:
        assert self.state(scaled())[:2] == ("Unknown", "Starting")
        assert self.state(scaled(autoscaler=live_autoscaler()))[:2] == ("Unknown", "Starting")

    def test_without_a_pod_that_answers_there_are_no_metrics_yet(self) -> None:
        waiting = scaled(
            pods=(pod_of(),), autoscaler=live_autoscaler(**GOOD | {"ScalingActive": NO_SERIES})
        )

        assert self.state(waiting)[:2] == ("False", "Starting")

    def test_metrics_that_cannot_be_read_are_told_with_what_to_look_at(self) -> None:
        """Prometheus down, a stale or an absent series: the count is held."""
        status, reason, message = self.state(
            scaled(pods=READY, autoscaler=live_autoscaler(**GOOD | {"ScalingActive": NO_SERIES}))
        )

        assert (status, reason) == ("False", "MetricUnavailable")
        assert "no metrics returned from external metrics API" in message
        assert "the number of pods stays as it is" in message

    def test_nobody_serves_the_metrics(self) -> None:
        tier = scaled(external_metrics=external_metrics(None), autoscaler=live_autoscaler(**GOOD))

        status, reason, message = self.state(tier)

        assert (status, reason) == ("False", "ProviderUnavailable")
        assert "install prometheus-adapter with the chart's rules" in message

    @pytest.mark.parametrize(("provider", "holder"), [("hpa", KEDAS), ("keda", ADAPTER)])
    def test_the_wrong_server_holds_the_metrics(
        self, provider: str, holder: ExternalMetrics
    ) -> None:
        tier = scaled(tier=tier_of(provider=provider), external_metrics=holder)

        status, reason, message = self.state(tier, KEDA)

        assert (status, reason) == ("False", "ProviderUnavailable")
        assert f"is held by the Service {holder.server}" in message
        other = "keda" if provider == "hpa" else "hpa"
        assert f"set spec.autoscaling.provider to {other}" in message

    def test_the_server_of_the_metrics_is_down(self) -> None:
        service = api_service("False", "endpoints for service/prometheus-adapter not found")

        status, reason, message = self.state(
            scaled(pods=READY, external_metrics=external_metrics(service))
        )

        assert (status, reason) == ("False", "ProviderUnavailable")
        assert "endpoints for service/prometheus-adapter not found" in message

    @pytest.mark.parametrize(
        ("metrics", "active", "is_again"),
        [
            (ADAPTER, NO_SERIES, True),
            (KEDAS, GOOD["ScalingActive"], True),
            (external_metrics(None), GOOD["ScalingActive"], True),
            (ADAPTER, GOOD["ScalingActive"], False),
            (ExternalMetrics(), NO_SERIES, False),
        ],
        ids=["nothing read", "another's", "nobody's", "all is well", "not to be seen"],
    )
    def test_what_may_lie_at_the_server_is_looked_at_again(
        self, metrics: ExternalMetrics, active: tuple[str, str, str], is_again: bool
    ) -> None:
        tier = scaled(
            pods=READY,
            external_metrics=metrics,
            autoscaler=live_autoscaler(**GOOD | {"ScalingActive": active}),
        )

        assert is_obstructed(tier, SETTINGS) is is_again

    def test_who_may_not_look_at_the_server_believes_the_autoscaler(self) -> None:
        tier = scaled(external_metrics=ExternalMetrics(), autoscaler=live_autoscaler(**GOOD))

        assert self.state(tier)[:2] == ("True", "Scaling")

    def test_a_deployment_that_cannot_be_scaled_is_told(self) -> None:
        broken = GOOD | {"AbleToScale": ("False", "FailedUpdateScale", "the server is busy")}

        status, reason, message = self.state(scaled(autoscaler=live_autoscaler(**broken)))

        assert (status, reason) == ("False", "ProviderUnavailable")
        assert "the server is busy" in message

    def test_an_autoscaler_of_somebody_else_is_named(self) -> None:
        fixed = ScaledTier(OWNER, tier_of(), foreign=("theirs",))

        status, reason, message = self.state(fixed)

        assert (status, reason) == ("False", "ForeignAutoscaler")
        assert "theirs" in message
        assert "provider to none" in message

    def test_two_autoscalers_that_stop_each_other_are_told(self) -> None:
        words = "pods by selector app=chat are controlled by multiple HPAs: [team/a team/b]"
        stopped = GOOD | {"ScalingActive": ("False", "AmbiguousSelector", words)}

        status, reason, message = self.state(
            scaled(pods=READY, autoscaler=live_autoscaler(**stopped))
        )

        assert (status, reason) == ("False", "ForeignAutoscaler")
        assert "team/b" in message

    def test_a_provider_of_somebody_s_own_is_left_alone(self) -> None:
        tier = scaled(tier=tier_of(provider="none"), external_metrics=external_metrics(None))

        assert self.state(tier)[:2] == ("False", "LeftToOthers")

    def test_keda_that_is_not_installed_is_told(self) -> None:
        tier = scaled(tier=tier_of(provider="keda"), external_metrics=KEDAS)

        status, reason, message = self.state(tier)

        assert (status, reason) == ("False", "ProviderUnavailable")
        assert "settings.keda" in message

    @pytest.mark.parametrize(
        ("ready", "expected"),
        [
            (None, ("Unknown", "Starting")),
            (("Unknown", "", ""), ("Unknown", "Starting")),
            (("False", "ScaledObjectCheckFailed", "no such host"), ("False", "MetricUnavailable")),
            (("True", "ScaledObjectReady", "defined correctly"), ("True", "Scaling")),
        ],
    )
    def test_keda_s_word_on_its_scaled_object_is_passed_on(
        self, ready: tuple[str, str, str] | None, expected: tuple[str, str]
    ) -> None:
        conditions = {} if ready is None else {"Ready": ready}
        tier = scaled(
            tier=tier_of(provider="keda"),
            pods=READY,
            external_metrics=KEDAS,
            scaled_object=live_autoscaler(kind=SCALED_OBJECT.kind, **conditions),
        )

        assert self.state(tier, KEDA)[:2] == expected


def api_service(status: str, message: str) -> Manifest:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
        "spec": {"service": {"namespace": "monitoring", "name": "prometheus-adapter"}},
        "status": {"conditions": [{"type": "Available", "status": status, "message": message}]},
    }


def test_an_api_service_names_its_server() -> None:
    assert external_metrics(api_service("True", "all checks passed")) == ADAPTER
    assert external_metrics(None) == ExternalMetrics(True)


class TestInThePlan:
    """The plan carries it out, and the status tells of it."""

    def scene(self, **scaling: Any) -> Simulation:
        document: dict[str, Any] = CPU | {"autoscaling": {"maxReplicas": 4} | scaling}
        cluster = Simulation(document)
        cluster.settle()
        cluster.roll_out()
        cluster.pods = [pod_of(ready=True)]
        return cluster

    def scale(self, cluster: Simulation, replicas: int) -> None:
        """Play the HPA controller, which writes through the subresource."""
        cluster.deployment["spec"]["replicas"] = replicas
        cluster.deployment["replicaManagers"] = ["kube-controller-manager"]

    def test_an_object_gets_its_autoscaler_and_then_nothing_is_left_to_do(self) -> None:
        cluster = self.scene()

        assert cluster.child(AUTOSCALER.kind, "chat-primary")["spec"]["maxReplicas"] == 4
        assert cluster.plan().is_empty

    def test_a_count_that_the_autoscaler_set_survives_fifty_rounds_and_an_edit(self) -> None:
        """Case A01."""
        cluster = self.scene()
        self.scale(cluster, 4)

        for _ in range(50):
            assert cluster.reconcile().is_empty
        cluster.document["pod"] = {"env": [{"name": "A", "value": "b"}]}
        todo = cluster.plan()

        (edited,) = [m for m in todo.apply if m["kind"] == DEPLOYMENT.kind]
        assert "replicas" not in edited["spec"]

    def test_the_end_of_autoscaling_sets_the_count_once(self) -> None:
        cluster = self.scene()
        self.scale(cluster, 4)
        del cluster.document["autoscaling"]

        first = cluster.reconcile()
        second = cluster.reconcile()
        third = cluster.plan()

        assert [live["kind"] for live in first.delete] == [AUTOSCALER.kind]
        assert not any("replicas" in m["spec"] for m in first.apply if m["kind"] == "Deployment")
        assert [m["spec"]["replicas"] for m in second.apply] == [1]
        assert third.is_empty

    def test_growing_is_no_reason_not_to_be_ready(self) -> None:
        cluster = self.scene()
        cluster.reconcile()
        assert condition(cluster.status, "Ready")["status"] == "True"

        self.scale(cluster, 3)
        cluster.roll_out(replicas=1, updatedReplicas=1, readyReplicas=1, availableReplicas=1)
        cluster.reconcile()

        assert condition(cluster.status, "Ready")["status"] == "True"
        assert condition(cluster.status, "Progressing")["status"] == "True"
        assert (cluster.status["wantedReplicas"], cluster.status["readyReplicas"]) == (3, 1)

    def test_what_the_autoscaler_says_is_in_the_status(self) -> None:
        cluster = self.scene()
        live = cluster.child(AUTOSCALER.kind, "chat-primary")
        live["status"] = live_autoscaler(desired=1, **GOOD)["status"]
        cluster.reconcile()

        assert condition(cluster.status, "ScalingActive")["reason"] == "Scaling"

    def test_trouble_with_scaling_and_its_end_are_events(self) -> None:
        cluster = self.scene()
        live = cluster.child(AUTOSCALER.kind, "chat-primary")
        told = []
        for conditions in (
            GOOD,
            GOOD | {"ScalingActive": NO_SERIES},
            GOOD | {"ScalingActive": NO_SERIES},
            GOOD,
        ):
            before = cluster.status
            live["status"] = live_autoscaler(**conditions)["status"]
            cluster.reconcile()
            told.append([(note.type, note.reason) for note in notes(before, cluster.status)])

        assert told[1:] == [[("Warning", "MetricUnavailable")], [], [("Normal", "Scaling")]]
        assert "Scaling" not in str(told[0])

    def test_an_autoscaler_that_cannot_be_written_leaves_the_object_ready(self) -> None:
        cluster = self.scene()
        cluster.objects.pop(Reference(AUTOSCALER.kind, "team", "chat-primary"))
        taken = Refusal(
            Reference(AUTOSCALER.kind, "team", "chat-primary"), "It exists.", is_taken=True
        )

        status = status_of(cluster.spec, cluster.observed(), cluster.plan(), [taken], NOW)

        assert condition(status, "Ready")["status"] == "True"
        assert condition(status, "Progressing")["reason"] == "RolloutComplete"
        assert condition(status, "ScalingActive")["reason"] == "ApplyRefused"

    def test_a_change_of_provider_is_one_autoscaler_after_the_other(self) -> None:
        cluster = self.scene()
        cluster.settings = KEDA
        cluster.document["autoscaling"]["provider"] = "keda"

        kinds = []
        for _ in range(3):
            todo = cluster.reconcile()
            kinds.append(([m["kind"] for m in todo.apply], [live["kind"] for live in todo.delete]))

        assert kinds == [([], [AUTOSCALER.kind]), ([SCALED_OBJECT.kind], []), ([], [])]


def horizontal(total: float, target: int, counted: int, tolerance: float) -> int:
    """What the HPA controller wants of an External metric with an AverageValue.

    Source: GetExternalPerPodMetricReplicas, k8s.io/kubernetes/pkg/controller/podautoscaler.

    Args:
        total: The values of all pods, added up.
        target: The mean a pod that is aimed at.
        counted: The pods that there are, those of a surge too.
        tolerance: Deviation of the mean that is not acted on.
    """
    ratio = total / (target * counted)
    if 1 - tolerance <= ratio <= 1 + tolerance:
        return counted
    return math.ceil(total / target)


class TestArithmetic:
    """Cases B01, B04 and B05, by the formula of the HPA controller."""

    @given(
        total=st.integers(1, 2000),
        wanted=st.integers(1, 20),
        surge=st.sampled_from([-1, 0, 1]),
    )
    def test_a_rollout_does_not_move_the_wanted_count(
        self, total: int, wanted: int, surge: int
    ) -> None:
        counted = max(1, wanted + surge)

        assert horizontal(total, 80, counted, 0) == math.ceil(total / 80)

    def test_with_kubernetes_own_tolerance_it_would(self) -> None:
        assert horizontal(330, 80, 4, 0.1) == 4
        assert horizontal(330, 80, 5, 0.1) == 5

    def test_an_idle_engine_goes_back_to_the_fewest_whatever_its_weights_take(self) -> None:
        assert horizontal(0, 80, 3, 0) == 0
        assert horizontal(3 * 40, 80, 3, 0) == 2


class Ownership(RuleBasedStateMachine):
    """The operator, an HPA and people write `replicas`, in any order and over each other.

    Server-side apply is played by its rules: an applied field that others own with the same value
    is shared; a field that nobody owns any more is gone, and its default is 1.
    """

    def __init__(self) -> None:
        super().__init__()
        # Three fixed pods, for which autoscaling has just been turned on.
        self.count = self.last_wanted = 3
        self.owners = {"deepseek-operator"}
        self.version = 1
        self.seen: ScaledTier | None = None

    @rule()
    def observe(self) -> None:
        live = deployment(self.count, *self.owners)
        live["metadata"]["resourceVersion"] = str(self.version)
        self.seen = scaled(deployment=live)

    @rule()
    def apply(self) -> None:
        """Of what was observed, maybe a while ago."""
        if self.seen is None:
            return
        sent, version = applied_replicas(self.seen)
        if version is not None and version != str(self.version):
            return
        self.version += 1
        if sent is not None:
            self.owners = {"deepseek-operator"} | (self.owners if sent == self.count else set())
            self.count = sent
            return
        self.owners.discard("deepseek-operator")
        if not self.owners:
            self.count = 1

    @rule(count=st.integers(1, 5), writer=st.sampled_from(["kube-controller-manager", "kubectl"]))
    def scale(self, count: int, writer: str) -> None:
        """An HPA writes nothing where it wants nothing else."""
        if count != self.count:
            self.count, self.owners = count, {writer}
            self.version += 1
        self.last_wanted = count

    @rule()
    def other_change(self) -> None:
        self.version += 1

    @invariant()
    def the_last_word_of_the_others_stands(self) -> None:
        assert self.count == self.last_wanted


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=50, stateful_step_count=20)


@given(
    document=st.fixed_dictionaries(
        {"maxReplicas": st.integers(1, 1000)},
        optional={
            "minReplicas": st.just(1),
            "gpuMemoryPercent": st.integers(1, 100),
            "metric": st.sampled_from(["demand", "used", "nvidia.com/gpu_memory_used_percent"]),
            "queuedRequestsPerReplica": st.integers(1, 10_000),
            "provider": st.sampled_from(["hpa", "keda"]),
        },
    )
)
def test_whatever_is_accepted_gives_an_autoscaler_within_its_limits(
    document: dict[str, Any],
) -> None:
    spec = DeepSeekDeploymentSpec.parse(CPU | {"autoscaling": document})

    manifest = autoscaler(ScaledTier(OWNER, tiers_of(spec)[0]), KEDA)

    assert manifest is not None
    limits = manifest["spec"]
    low = limits.get("minReplicas", limits.get("minReplicaCount"))
    high = limits.get("maxReplicas", limits.get("maxReplicaCount"))
    assert 1 <= low <= high == document["maxReplicas"]


@pytest.mark.control_plane
@pytest.mark.timeout(300)
class TestAgainstTheRealServer:
    """The API server, and the controllers of Deployments and HPAs of Kubernetes itself.

    Nobody serves metrics here; an HPA keeps to its limits all the same.
    """

    def serve(self, server: Server, namespace: str, **spec: Any) -> None:
        server.apply(
            {
                "apiVersion": "deepseek.dev/v1alpha1",
                "kind": "DeepSeekDeployment",
                "metadata": {"name": "chat", "namespace": namespace},
                "spec": CPU | spec,
            }
        )

    def live(self, server: Server, namespace: str) -> Manifest:
        found = server.get(DEPLOYMENT, namespace, "chat-primary")
        assert found is not None
        return found

    def replicas(self, server: Server, namespace: str) -> int:
        found = server.get(DEPLOYMENT, namespace, "chat-primary")
        return -1 if found is None else int(found["spec"]["replicas"])

    def said(self, server: Server, namespace: str) -> Manifest:
        found = server.get(DEEPSEEK_DEPLOYMENT, namespace, "chat") or {}
        return condition(found["status"], "ScalingActive")

    def test_the_hpa_s_count_survives_edits_and_the_spec_s_comes_back_after_it(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A01."""
        start()
        self.serve(server, namespace, replicas=2)
        eventually(lambda: self.replicas(server, namespace) == 2)

        # The count in use is kept until the HPA has set one.
        self.serve(server, namespace, replicas=2, autoscaling={"maxReplicas": 5})
        eventually(lambda: server.get(AUTOSCALER, namespace, "chat-primary"))
        assert self.replicas(server, namespace) == 2
        limits = {"minReplicas": 4, "maxReplicas": 5}
        self.serve(server, namespace, replicas=2, autoscaling=limits)
        eventually(lambda: self.replicas(server, namespace) == 4)
        eventually(lambda: "kube-controller-manager" in str(self.live(server, namespace)))

        # An edit of the pods is applied without the count, and no older one comes back.
        for number in range(5):
            env = [{"name": "ROUND", "value": str(number)}]
            self.serve(server, namespace, replicas=2, autoscaling=limits, pod={"env": env})
            eventually(lambda env=env: env[0] in self.environment(server, namespace))
            assert self.replicas(server, namespace) == 4
        owners = [
            entry["manager"]
            for entry in self.live(server, namespace)["metadata"]["managedFields"]
            if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
        ]
        assert len(owners) == 1
        assert owners[0].startswith("kube-controller-manager")

        # Without metrics a lower limit is no reason to end pods.
        limits["minReplicas"] = 1
        self.serve(server, namespace, replicas=2, autoscaling=limits)
        eventually(
            lambda: server.get(AUTOSCALER, namespace, "chat-primary")["spec"]["minReplicas"] == 1
        )
        eventually(lambda: self.said(server, namespace)["reason"] == "Starting")
        assert self.replicas(server, namespace) == 4

        self.serve(server, namespace, replicas=2)
        eventually(lambda: self.replicas(server, namespace) == 2)
        assert server.get(AUTOSCALER, namespace, "chat-primary") is None
        eventually(lambda: self.said(server, namespace)["reason"] == "FixedReplicas")

    def environment(self, server: Server, namespace: str) -> list[Manifest]:
        pod = self.live(server, namespace)["spec"]["template"]["spec"]
        found: list[Manifest] = pod["containers"][0]["env"]
        return found

    def test_the_autoscaler_comes_back_from_the_server_as_it_was_applied(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()
        behavior = {"scaleDown": {"stabilizationWindowSeconds": 5, "selectPolicy": "Min"}}
        self.serve(server, namespace, autoscaling={"maxReplicas": 5, "behavior": behavior})
        live = eventually(lambda: server.get(AUTOSCALER, namespace, "chat-primary"))

        assert live["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 5
        assert live["spec"]["behavior"]["scaleDown"]["tolerance"] == "0"
        before = quiet(operator)
        server.patch(AUTOSCALER, namespace, "chat-primary", {"spec": {"maxReplicas": 9}})
        eventually(
            lambda: server.get(AUTOSCALER, namespace, "chat-primary")["spec"]["maxReplicas"] == 5
        )
        key = ("patch", AUTOSCALER.resource)
        assert quiet(operator)[key] == before[key] + 1
        assert "came back from the API server" not in operator.log

    def test_an_autoscaler_of_somebody_else_is_told_and_not_fought(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()
        self.serve(server, namespace)
        eventually(lambda: self.replicas(server, namespace) == 1)
        theirs = autoscaler(scaled(tier=tier_of(minReplicas=3)), SETTINGS)
        assert theirs is not None
        theirs["metadata"] = {"name": "theirs", "namespace": namespace}

        server.apply(theirs)
        eventually(lambda: self.replicas(server, namespace) == 3)
        eventually(lambda: self.said(server, namespace)["reason"] == "ForeignAutoscaler")

        assert "theirs" in self.said(server, namespace)["message"]
        before = quiet(operator)
        assert self.replicas(server, namespace) == 3
        # Looked at again by itself, since nobody tells of the end.
        server.delete(AUTOSCALER, namespace, "theirs")
        eventually(lambda: self.replicas(server, namespace) == 1)
        eventually(lambda: self.said(server, namespace)["reason"] == "FixedReplicas")
        key = ("patch", DEPLOYMENT.resource)
        assert operator.writes()[key] == before[key] + 1

    def test_two_autoscalers_of_one_deployment_are_told(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        start()
        self.serve(server, namespace, autoscaling={"maxReplicas": 5})
        eventually(lambda: server.get(AUTOSCALER, namespace, "chat-primary"))
        theirs = autoscaler(scaled(), SETTINGS)
        assert theirs is not None
        theirs["metadata"] = {"name": "theirs", "namespace": namespace}

        server.apply(theirs)

        eventually(lambda: self.said(server, namespace)["reason"] == "ForeignAutoscaler")
        assert "theirs" in self.said(server, namespace)["message"]
        server.delete(AUTOSCALER, namespace, "theirs")
        eventually(lambda: self.said(server, namespace)["reason"] != "ForeignAutoscaler")

    def test_an_autoscaler_whose_name_is_taken_leaves_the_object_serving(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        taken = autoscaler(scaled(), SETTINGS)
        assert taken is not None
        taken["metadata"] = {"name": "chat-primary", "namespace": namespace}
        taken["spec"]["scaleTargetRef"]["name"] = "something-else"
        server.apply(taken)
        start()

        self.serve(server, namespace, autoscaling={"maxReplicas": 5})

        with kubelet(server, namespace):
            eventually(lambda: self.said(server, namespace)["reason"] == "ApplyRefused")
            eventually(lambda: reason(server, namespace) == "Available")
        live = server.get(AUTOSCALER, namespace, "chat-primary")
        assert live is not None
        assert live["spec"]["scaleTargetRef"]["name"] == "something-else"

    def test_kedas_scaled_object_is_one_that_kedas_own_schema_accepts(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """KEDA itself does not run here: its CRD is checked, and that nothing is left over."""
        crds = programs.sources("keda") / "config/crd/bases"
        server.apply(yaml.safe_load((crds / "keda.sh_scaledobjects.yaml").read_text()))
        path = SCALED_OBJECT.path(namespace)
        eventually(lambda: server.ask("GET", path).status_code == 200)
        operator = start(KEDA="true")
        scaling = {"maxReplicas": 5, "provider": "keda"}
        self.serve(server, namespace, autoscaling=scaling)
        live = eventually(lambda: server.get(SCALED_OBJECT, namespace, "chat-primary"))

        strict = {"metadata": {"name": "strict", "namespace": namespace}, "kind": live["kind"]}
        strict |= {"apiVersion": live["apiVersion"], "spec": live["spec"]}
        answer = server.ask("POST", path, strict, fieldValidation="Strict", dryRun="All")
        assert answer.status_code == 201, answer.text
        quiet(operator)
        eventually(lambda: self.said(server, namespace)["reason"] == "Starting")

        self.serve(server, namespace, autoscaling=scaling | {"provider": "hpa"})
        eventually(lambda: server.get(AUTOSCALER, namespace, "chat-primary"))
        assert server.get(SCALED_OBJECT, namespace, "chat-primary") is None
        self.serve(server, namespace, autoscaling=scaling)
        eventually(lambda: server.get(SCALED_OBJECT, namespace, "chat-primary"))
        assert server.get(AUTOSCALER, namespace, "chat-primary") is None
        assert operator.stop() == 0
