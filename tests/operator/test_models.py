"""Whether a tier's pods find their model and its adapters."""

import pytest
from scenes import CPU, Simulation, claim


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("package://smollm2", "InWorkerImage"),
        ("oci://registry.example/tiny:1", "InImageVolume"),
        ("nodePath:///srv/tiny", "OnNode"),
    ],
)
def test_what_is_with_the_pod_may_start_at_once(source: str, reason: str) -> None:
    todo = Simulation({"model": {"source": source}, **CPU}).plan()

    assert (todo.model.status, todo.model.reason) == ("True", reason)
    assert "Deployment" in {m["kind"] for m in todo.apply}


@pytest.mark.parametrize(
    ("live", "reason", "status"),
    [
        (None, "ClaimMissing", "False"),
        (claim("Pending"), "ClaimPending", "False"),
        (claim(), "InWorkerImage", "True"),
    ],
)
def test_a_claim_of_an_adapter(live: dict | None, reason: str, status: str) -> None:
    lora = [{"name": "terse", "source": "pvc://adapters/terse"}]
    cluster = Simulation({"model": {"lora": lora}, **CPU}, foreign_claim=live)

    todo = cluster.plan()

    assert (todo.model.reason, todo.model.status) == (reason, status)
    if live is None:
        assert "no PersistentVolumeClaim adapters" in todo.model.message
        assert "change the source of 'terse' in spec.model.lora" in todo.model.message
