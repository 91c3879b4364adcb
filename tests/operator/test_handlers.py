"""Watching through faults: broken watches, refusals, storms, and what is never left behind."""

import threading
from typing import Any

import kopf
import pytest
from fault_proxy import Fault, FaultProxy, lists, watches, writes
from real import Server, eventually
from scenes import SETTINGS
from test_controller import (
    CPU,
    FALLBACK,
    children,
    complete,
    dsd,
    quiet,
    reason,
    settled,
    wanted_children,
)

from conftest import Start
from deepseek_operator.handlers import Backoffs, NothingRemembered, configured, registry_of
from deepseek_operator.kinds import (
    AUTOSCALER,
    DEEPSEEK_DEPLOYMENT,
    DEPLOYMENT,
    SERVICE,
    Kind,
    Manifest,
)

GONE = {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired", "message": "old"}
DSD = DEEPSEEK_DEPLOYMENT.resource


def ignore(*_: object) -> None:
    """Nobody is told."""


class TestSettings:
    def test_every_kind_but_our_own_is_watched_by_its_label(self) -> None:
        settings = kopf.OperatorSettings()

        configured(settings, SETTINGS)

        assert len(settings.watching.label_selectors) == 11
        assert settings.watching.chunk_size == 500
        assert settings.posting.enabled is False
        assert settings.scanning.disabled is True

    def test_only_events_are_handled_so_no_finalizer_is_ever_set(self) -> None:
        registry = registry_of(ignore, ignore, SETTINGS, ignore)

        assert len(registry._watching.get_all_handlers()) == 13
        assert registry._changing.get_all_handlers() == []
        assert registry._spawning.get_all_handlers() == []

    def test_kedas_kind_is_watched_where_keda_is_installed(self) -> None:
        settings = kopf.OperatorSettings()

        configured(settings, SETTINGS.model_copy(update={"keda": True}))

        assert len(settings.watching.label_selectors) == 12

    def test_tenants_are_watched_where_the_whole_cluster_is_served(self) -> None:
        def watched(**changes: Any) -> set[str]:
            chosen = SETTINGS.model_copy(update=changes)
            registry = registry_of(ignore, ignore, chosen, ignore)
            return {str(h.selector.any_name) for h in registry._watching.get_all_handlers()}  # type: ignore[union-attr]

        assert watched() - watched(watch_namespaces=("team",)) == {
            "deepseektenants", "resourcequotas",
        }  # fmt: skip

    def test_nothing_is_remembered_on_objects(self) -> None:
        storage = NothingRemembered()

        assert storage.build(body={}) == {}
        assert storage.fetch(body={}) is None
        assert storage.clear(essence={"a": 1}) == {"a": 1}
        patch: dict[str, Any] = {}
        storage.store(body={}, patch=patch, essence={})
        storage.purge(body={}, patch=patch)
        storage.touch(body={}, patch=patch, value="x")
        assert patch == {}

    def test_pauses_between_tries_grow_and_differ(self) -> None:
        one, other = list(Backoffs()), list(Backoffs())

        assert len(one) == len(Backoffs()) == 9
        assert all(0.1 <= pause <= 10 for pause in one)
        assert one != other
        assert sum(one) > 10


@pytest.mark.control_plane
@pytest.mark.timeout(300)
class TestFaults:
    """Cases A21, A22, A24 and what else an API server does on a bad day."""

    @pytest.mark.parametrize(
        "fault",
        [
            Fault(watches(DSD), event={"type": "ERROR", "object": GONE}),
            Fault(watches(DSD), status=410, body=GONE),
            Fault(
                watches(DSD),
                event={"type": "ERROR", "object": {**GONE, "code": 500, "reason": "Internal"}},
            ),
            Fault(watches(DSD), status=503),
            Fault(watches(DSD), cut=True, times=2),
            Fault(lists(DSD), status=429, headers={"Retry-After": "1"}, times=2),
            Fault(lists(DEPLOYMENT.resource), status=410, body=GONE),
        ],
        ids=[
            "410 as an event", "410 as a status", "another error event", "503",
            "connection cut", "429 on lists", "410 on a list",
        ],
    )  # fmt: skip
    def test_a_change_is_seen_in_spite_of(
        self, server: Server, namespace: str, start: Start, fault: Fault
    ) -> None:
        fault.hits.clear()
        server.apply(dsd(namespace, "old"))
        with FaultProxy(server.plane) as proxy:
            proxy.add(fault)
            operator = start(address=proxy.address)
            operator.lead()
            eventually(lambda: fault.hits, what="the fault strikes")

            server.apply(dsd(namespace, "new"))

            complete(server, namespace, "old")
            complete(server, namespace, "new")
            assert operator.process is not None
            assert operator.process.poll() is None
            operator.stop()

    def test_a_watch_that_went_silent_is_opened_again(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        with FaultProxy(server.plane) as proxy:
            fault = proxy.add(Fault(watches(DSD), stall=True))
            operator = start(address=proxy.address, WATCH_SECONDS="10")
            eventually(lambda: fault.hits)

            server.apply(dsd(namespace))

            eventually(lambda: children(server, namespace) >= wanted_children())
            operator.stop()

    def test_what_was_deleted_before_kopf_listed_again_is_known(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Its children would be made again, and collected again, until the next resync."""
        is_deleted = threading.Event()
        server.apply(dsd(namespace))
        with FaultProxy(server.plane) as proxy:
            deaf = Fault(
                lambda request: watches(DSD)(request) and not is_deleted.is_set(),
                stall=True,
                times=10**6,
            )
            too_old = Fault(
                lambda request: watches(DSD)(request) and is_deleted.is_set(),
                event={"type": "ERROR", "object": GONE},
            )
            proxy.add(deaf)
            proxy.add(too_old)
            operator = start(address=proxy.address, WATCH_SECONDS="10")
            complete(server, namespace)

            server.delete(DEEPSEEK_DEPLOYMENT, namespace, "chat")
            is_deleted.set()
            eventually(lambda: too_old.hits, what="the watch is too old")

            eventually(lambda: not children(server, namespace), every=1.0)
            quiet(operator)
            assert not children(server, namespace)
            operator.stop()

    def test_an_event_that_got_lost_is_found_by_listing(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        with FaultProxy(server.plane) as proxy:
            fault = proxy.add(Fault(watches(SERVICE.resource), swallow='"DELETED"', times=99))
            operator = start(address=proxy.address, RESYNC_SECONDS="2")
            server.apply(dsd(namespace))
            complete(server, namespace)
            eventually(lambda: fault.hits, what="the watch is one that loses events")

            server.delete(SERVICE, namespace, "chat")

            complete(server, namespace)
            operator.stop()

    @pytest.mark.parametrize(
        ("kind", "child", "wish", "is_gone_before"),
        [
            (DEPLOYMENT, "chat-small", FALLBACK, False),
            (DEPLOYMENT, "chat-small", FALLBACK, True),
            (AUTOSCALER, "chat-primary", {"autoscaling": {"maxReplicas": 2}}, False),
        ],
        ids=["a Deployment", "a Deployment that is gone before", "an autoscaler"],
    )
    def test_a_child_is_deleted_once_though_the_watch_lags(
        self, server: Server, namespace: str, start: Start,
        kind: Kind, child: str, wish: Manifest, is_gone_before: bool,
    ) -> None:  # fmt: skip
        def want(spec: Manifest, tier: str | None) -> None:
            made = dsd(namespace, spec=CPU | spec)
            made["metadata"]["annotations"] = {"deepseek.dev/pin": tier} if tier else {}
            server.apply(made)

        def uid() -> str | None:
            live = server.get(kind, namespace, child)
            return live["metadata"]["uid"] if live is not None else None

        told = threading.Event()
        told.set()
        with FaultProxy(server.plane) as proxy:
            proxy.add(Fault(watches(kind.resource), hold=told, times=10**6))
            operator = start(address=proxy.address)
            tier = "small" if kind == DEPLOYMENT else None
            want(wish, tier)
            eventually(uid, what=f"{child} is made")
            quiet(operator)
            first = uid()

            told.clear()
            if is_gone_before:
                server.delete(kind, namespace, child)
            want({}, None)
            eventually(lambda: proxy.count("delete", kind.resource), what="it is deleted")
            quiet(operator)
            assert uid() is None
            # Another one of the name, of which the watch has not told when it tells of the first.
            want(wish, tier)
            eventually(uid, what=f"{child} is made anew")
            second = uid()
            told.set()
            quiet(operator)

            assert uid() == second != first
            assert proxy.count("delete", kind.resource) == 1
            want({}, None)
            eventually(lambda: uid() is None, what="the new one is known and deleted too")
            quiet(operator)
            assert proxy.count("delete", kind.resource) == 2
            operator.stop()

    def test_conflicts_on_every_kind_are_tried_again(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A21: the first three writes of each kind answer 409."""
        with FaultProxy(server.plane) as proxy:
            proxy.add(Fault(writes(), status=409, times=3))
            operator = start(address=proxy.address)

            server.apply(dsd(namespace))

            eventually(lambda: children(server, namespace) == wanted_children())
            conflicts = sum(status == 409 for _, status in proxy.seen)
            assert 3 * len(wanted_children()) <= conflicts <= 3 * 9
            operator.stop()

    def test_a_storm_of_refusals_passes(self, server: Server, namespace: str, start: Start) -> None:
        with FaultProxy(server.plane) as proxy:
            proxy.add(Fault(writes("services"), status=429, headers={"Retry-After": "1"}, times=2))
            proxy.add(Fault(writes("deployments.apps"), status=503, times=4))
            proxy.add(Fault(writes("secrets"), status=500, times=4))
            proxy.add(Fault(writes(f"{DSD}/status"), cut=True, times=2))
            operator = start(address=proxy.address)

            server.apply(dsd(namespace))

            complete(server, namespace)
            assert proxy.count("patch", "services") >= 3
            operator.stop()

    def test_an_object_that_cannot_be_written_holds_up_no_other(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A25's second half: refusals inside a namespace pass by themselves."""
        with FaultProxy(server.plane) as proxy:
            fault = proxy.add(Fault(writes("networkpolicies.networking.k8s.io"), status=403))
            operator = start(address=proxy.address)

            server.apply(dsd(namespace, "first"))
            eventually(lambda: fault.hits)
            server.apply(dsd(namespace, "second"))

            complete(server, namespace, "second")
            eventually(lambda: children(server, namespace) >= wanted_children("first"))
            operator.stop()

    @pytest.mark.parametrize("status", [403, 503])
    def test_while_a_change_is_refused_the_last_state_serves_and_the_object_says_so(
        self, server: Server, namespace: str, start: Start, status: int
    ) -> None:
        """One refusal that is final for now, and one that may pass: 422 and 409, 429 are alike."""
        with FaultProxy(server.plane) as proxy:
            operator = start(address=proxy.address)
            server.apply(dsd(namespace))
            settled(server, operator, namespace)
            fault = proxy.add(Fault(writes(DEPLOYMENT.resource), status=status, times=10**6))

            env = {"spec": {"pod": {"env": [{"name": "NEW", "value": "1"}]}}}
            server.patch(DEEPSEEK_DEPLOYMENT, namespace, "chat", env)

            eventually(lambda: reason(server, namespace, "Progressing") == "ApplyRefused")
            assert reason(server, namespace) in {"Available", "RolloutInProgress"}
            assert children(server, namespace) == wanted_children()
            # Two quick tries again, and pauses of seconds between: no storm.
            assert sum(fault.hits.values()) <= 20
            proxy.faults.clear()
            eventually(lambda: "NEW" in str(server.get(DEPLOYMENT, namespace, "chat-primary")))
            operator.stop()

    def test_a_broken_aggregated_api_does_not_hold_up_the_start(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A24: under a Role alone, and with an API service that nobody answers for."""
        path = "/apis/apiregistration.k8s.io/v1/apiservices"
        broken = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.custom.metrics.k8s.io"},
            "spec": {
                "group": "custom.metrics.k8s.io",
                "version": "v1beta1",
                "service": {"name": "nobody", "namespace": namespace},
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
        server.must("POST", path, broken)
        try:
            eventually(
                lambda: server.ask("GET", "/apis/custom.metrics.k8s.io/v1beta1").status_code == 503
            )
            operator = start()
            server.apply(dsd(namespace))

            complete(server, namespace)
            assert not [
                event
                for event in server.audit(operator.user)
                if event["responseStatus"]["code"] == 403
            ]
        finally:
            server.must("DELETE", f"{path}/v1beta1.custom.metrics.k8s.io")

    def test_two_hundred_objects_come_and_go_on_a_slow_server(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Cases A05 and A12: nothing hangs at its deletion, and no status write is lost."""
        with FaultProxy(server.plane, latency_seconds=(0.05, 0.2)) as proxy:
            operator = start(address=proxy.address)
            operator.lead()
            names = [f"many-{number}" for number in range(200)]
            for name in names:
                server.apply(dsd(namespace, name, {"gpu": {"mode": "cpu"}, "replicas": 0}))
            for number, name in enumerate(names):
                if number % 4 == 0:
                    labels = {"metadata": {"labels": {"touched": str(number)}}}
                    server.patch(DEEPSEEK_DEPLOYMENT, namespace, name, labels)
            at_once, told = names[::2], names[1::2]
            for name in at_once:
                server.delete(DEEPSEEK_DEPLOYMENT, namespace, name)
            eventually(
                lambda: with_status(server, namespace) >= set(told),
                what="every status is written",
                every=1.0,
            )
            for name in told:
                server.delete(DEEPSEEK_DEPLOYMENT, namespace, name)

            # To list 1,200 children is work for the server too.
            eventually(lambda: not server.list(DEEPSEEK_DEPLOYMENT, namespace), every=1.0)
            eventually(lambda: not children(server, namespace), every=1.0)
            operator.stop()


def with_status(server: Server, namespace: str) -> set[str]:
    """The objects that say what became of them."""
    return {
        live["metadata"]["name"]
        for live in server.list(DEEPSEEK_DEPLOYMENT, namespace)
        if (live.get("status") or {}).get("observedGeneration")
    }
