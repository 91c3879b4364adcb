"""Workers are asked how they do, against a real API server and a scripted worker."""

import time
from collections.abc import Iterator

import pytest
from real import Server, eventually
from responder import Responder, run_worker, token_of
from test_controller import complete, dsd, pods, quiet, reason, status_of

from conftest import Start
from deepseek_operator.kinds import DEEPSEEK_DEPLOYMENT

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(300)]


@pytest.fixture
def responder() -> Iterator[Responder]:
    with Responder() as found:
        yield found


def test_the_status_shows_the_memory_that_a_worker_tells(
    server: Server, namespace: str, start: Start, responder: Responder
) -> None:
    operator = start(WORKER_STATE_URL=responder.url, PROBE_SECONDS="0.5")
    server.apply(dsd(namespace))
    complete(server, namespace)
    (pod,) = eventually(lambda: pods(server, namespace))

    run_worker(server, pod)
    eventually(lambda: reason(server, namespace) == "Available")
    memory = eventually(lambda: status_of(server, namespace).get("memory"))
    quiet(operator)
    before = operator.writes()
    responder.states[pod["metadata"]["name"]] = {"used_percent": 44.0}
    asked = responder.asked[pod["metadata"]["name"]]
    eventually(lambda: responder.asked[pod["metadata"]["name"]] > asked + 4)

    assert memory == {
        "predictedBytes": {"weights": 100},
        "measuredBytes": {"weights": 110},
        "limitBytes": 1000,
        "usedPercent": 40,
    }
    assert responder.tokens == {f"Bearer {token_of(server, namespace)}"}
    # A change of four points is not worth a write, nor is asking.
    assert operator.writes() == before
    table = server.must(
        "GET",
        DEEPSEEK_DEPLOYMENT.path(namespace, "chat"),
        accept="application/json;as=Table;v=v1;g=meta.k8s.io",
    )
    columns = [column["name"] for column in table["columnDefinitions"]]
    assert table["rows"][0]["cells"][columns.index("Memory%")] == 40


def test_a_worker_that_answers_nonsense_harms_nothing(
    server: Server, namespace: str, start: Start, responder: Responder
) -> None:
    operator = start(WORKER_STATE_URL=responder.url, PROBE_SECONDS="0.3")
    server.apply(dsd(namespace))
    complete(server, namespace)
    (pod,) = eventually(lambda: pods(server, namespace))
    responder.states[pod["metadata"]["name"]] = {"phase": "sleeping"}

    run_worker(server, pod)
    eventually(lambda: reason(server, namespace) == "Available")
    eventually(lambda: responder.asked.get(pod["metadata"]["name"], 0) > 5)
    time.sleep(1)

    assert "memory" not in status_of(server, namespace)
    assert [p["metadata"]["uid"] for p in pods(server, namespace)] == [pod["metadata"]["uid"]]
    assert "not the state of a worker: phase" in operator.log
