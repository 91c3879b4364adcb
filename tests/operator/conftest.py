"""Shared by the operator's tests: builders on the import path, and one control plane a session."""

import itertools
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(REPOSITORY / "tools"))

from real import Operator, Server, connect, eventually, install_crds, log_end  # noqa: E402

from cluster import ControlPlane  # noqa: E402


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Tell what was in the cluster when a test failed: a wait that was in vain does not say why."""
    report = yield
    if report.when == "call" and report.failed:
        report.sections += [("Cluster", text) for text in _pictures(item.funcargs)]
    return report


def _pictures(fixtures: Mapping[str, Any]) -> Iterator[str]:
    try:
        for fixture in fixtures.values():
            if hasattr(fixture, "picture"):
                yield fixture.picture()
        if {"server", "namespace"} <= fixtures.keys():
            yield fixtures["server"].picture_of(fixtures["namespace"])
            yield "".join(log_end(log) for log in fixtures["tmp_path"].glob("*.log"))
    except (AssertionError, OSError, httpx.HTTPError) as error:
        yield f"The cluster cannot be looked at: {error!r}"


_numbers = itertools.count(1)

Start = Callable[..., Operator]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """etcd, API server and controller manager, with the CRDs installed."""
    components = ("kube-controller-manager",)
    # Nodes say once that they are Ready: see `add_node`.
    with ControlPlane("operator-tests", components, node_grace_seconds=3600) as plane:
        found = connect(plane)
        install_crds(found)
        yield found
        found.client.close()


@pytest.fixture
def namespace(server: Server) -> str:
    """A namespace of this test alone."""
    name = f"team-{next(_numbers)}"
    server.namespace(name, {"pod-security.kubernetes.io/enforce": "restricted"})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    eventually(lambda: server.ask("GET", account).status_code == 200)
    return name


@pytest.fixture
def start(server: Server, namespace: str, tmp_path: Path) -> Iterator[Start]:
    """Starts operators for the test's namespace, and ends them afterwards."""
    started: list[Operator] = []

    def starter(identity: str = "first", address: str = "", **settings: str) -> Operator:
        operator = Operator(server, namespace, tmp_path, identity, address, settings)
        if not started:
            operator.install()
        operator.start()
        started.append(operator)
        return operator

    yield starter
    for operator in started:
        if operator.process is not None and operator.process.poll() is None:
            operator.stop(signal.SIGKILL)
