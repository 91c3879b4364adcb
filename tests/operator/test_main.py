"""The process: one leader, restarts, crashes, and what happens while nobody is there."""

import os
import signal
import subprocess
import sys
import time

import pytest
from fault_proxy import Fault, FaultProxy, writes
from real import REPOSITORY, Server, eventually
from test_controller import children, complete, dsd, settled, wanted_children

from conftest import Start
from deepseek_operator.kinds import DEEPSEEK_DEPLOYMENT, LEASE
from deepseek_operator.settings import PREFIX


def test_a_wrong_setting_ends_the_process_with_its_name() -> None:
    environment = {**os.environ, f"{PREFIX}HTTP_PORT": "http"}

    ended = subprocess.run(
        [sys.executable, "-m", "deepseek_operator.main", "run"],
        env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert ended.returncode == 2
    assert "HTTP_PORT='http'" in ended.stderr


@pytest.mark.control_plane
@pytest.mark.timeout(300)
class TestRestart:
    def test_a_restart_writes_nothing_where_nothing_changed(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Its memory is the cluster itself."""
        first = start()
        server.apply(dsd(namespace))
        settled(server, first, namespace)
        code = first.stop()

        second = start("second")
        second.lead()
        eventually(lambda: second.requests()["watch", "pods"])
        time.sleep(1)

        assert code == 0
        assert second.writes() == {}

    def test_what_happened_meanwhile_is_found(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A06: objects go without the operator, and those that came are served."""
        first = start()
        server.apply(dsd(namespace, "goes"))
        server.apply(dsd(namespace, "stays"))
        complete(server, namespace, "goes")
        complete(server, namespace, "stays")
        first.stop()

        server.delete(DEEPSEEK_DEPLOYMENT, namespace, "goes")
        eventually(lambda: server.get(DEEPSEEK_DEPLOYMENT, namespace, "goes") is None)
        eventually(lambda: children(server, namespace) == wanted_children("stays"))
        server.apply(dsd(namespace, "comes"))
        server.delete(LEASE, namespace, "deepseek-operator")
        start("second")

        complete(server, namespace, "comes")
        assert children(server, namespace) == wanted_children("stays") | wanted_children("comes")

    def test_killed_in_the_middle_the_next_one_finishes(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        names = [f"n{number}" for number in range(20)]
        with FaultProxy(server.plane, latency_seconds=(0.2, 0.4)) as proxy:
            first = start(address=proxy.address, MAX_CONCURRENT_RECONCILES="1")
            first.lead()
            for name in names:
                server.apply(dsd(namespace, name))
            eventually(lambda: len(children(server, namespace)) > 10)
            first.stop(signal.SIGKILL)
        half = len(children(server, namespace))

        start("second")

        wanted = set().union(*(wanted_children(name) for name in names))
        eventually(lambda: children(server, namespace) == wanted)
        assert half < len(wanted)

    def test_a_namespace_that_is_deleted_does_not_hold_up_another(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A25."""
        other = f"{namespace}-other"
        server.namespace(other)
        operator = start()
        operator.stop()
        # The role of the first namespace, in the second one as well.
        binding = server.must(
            "GET",
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings/deepseek-operator",
        )
        role = server.must(
            "GET",
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/deepseek-operator",
        )
        for found in (role, binding):
            found["metadata"] = {"name": "deepseek-operator", "namespace": other}
            server.apply(found)
        operator.settings = {"WATCH_NAMESPACES": f"{namespace},{other}"}
        operator.start()
        server.apply(dsd(other))
        complete(server, other)

        server.must("DELETE", f"/api/v1/namespaces/{other}")
        server.apply(dsd(namespace))

        complete(server, namespace)
        eventually(lambda: server.ask("GET", f"/api/v1/namespaces/{other}").status_code == 404)


@pytest.mark.control_plane
@pytest.mark.timeout(300)
class TestBeingOne:
    def test_a_second_operator_waits_and_takes_over(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        first = start()
        first.lead()
        second = start("second")
        eventually(lambda: second.ask("/healthz").status_code == 200)
        time.sleep(2)
        waited = not second.is_leader()
        idle = second.writes()

        first.stop(signal.SIGKILL)
        eventually(second.is_leader)
        server.apply(dsd(namespace))

        assert waited
        assert idle == {}
        complete(server, namespace)

    def test_one_that_is_told_to_stop_hands_over_at_once(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        # Nobody would wait here until it ran out.
        first = start(LEASE_DURATION_SECONDS="600")
        first.lead()
        second = start("second")
        eventually(lambda: second.ask("/healthz").status_code == 200)

        code = first.stop()
        eventually(second.is_leader)

        assert code == 0

    def test_a_lost_lease_ends_the_process(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()
        operator.lead()

        spec = {"spec": {"holderIdentity": "another", "leaseDurationSeconds": 60}}
        server.patch(LEASE, namespace, "deepseek-operator", spec)

        assert operator.process is not None
        assert operator.process.wait(60) == 1
        assert "was taken by another" in operator.log

    def test_the_lease_is_renewed_while_all_other_requests_hang(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """One object has more children than the operator has connections here."""
        with FaultProxy(server.plane) as proxy:
            fault = proxy.add(Fault(writes(), stall=True, times=10**6))
            operator = start(address=proxy.address, MAX_CONCURRENT_RECONCILES="1")
            operator.lead()
            server.apply(dsd(namespace))
            eventually(lambda: len(fault.hits) >= 4, what="all connections are taken")
            before = proxy.count("update", LEASE.resource)

            # Twice as often as it may be late.
            eventually(lambda: proxy.count("update", LEASE.resource) >= before + 8)

            assert operator.process is not None
            assert operator.process.poll() is None
            operator.stop(signal.SIGKILL)

    def test_a_deleted_lease_is_taken_again(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()
        operator.lead()

        server.delete(LEASE, namespace, "deepseek-operator")

        lease = eventually(lambda: server.get(LEASE, namespace, "deepseek-operator"))
        assert lease["spec"]["holderIdentity"] == "first"
        assert operator.is_leader()

    def test_an_api_server_that_is_away_for_seconds_is_waited_for(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start(LEASE_DURATION_SECONDS="300")
        operator.lead()
        server.plane.stop_component("kube-apiserver")
        time.sleep(1)
        server.plane.start_api_server()

        eventually(lambda: server.apply(dsd(namespace)))

        eventually(lambda: children(server, namespace) >= wanted_children())
        assert operator.process is not None
        assert operator.process.poll() is None
