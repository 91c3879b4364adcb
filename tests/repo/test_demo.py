"""Which cluster the demo runs on, and what it needs of that."""

import pytest

import demo
from cluster import Cluster


@pytest.fixture
def commands(monkeypatch):
    """What the demo asks of somebody's cluster, instead of asking it."""
    asked = []

    def run(target, program, *words):
        asked.append((target.kubeconfig, program, *words))
        return ""

    monkeypatch.setattr(demo.Target, "run", run)
    monkeypatch.setattr(demo.programs, "ensure", lambda names: {})
    return asked


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_CACHE", str(tmp_path))
    for name in ("KUBECONFIG", "DEEPSEEK_OPERATOR_IMAGE", "DEEPSEEK_WORKER_IMAGE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("is_named", [False, True], ids=["no cluster named", "by cluster env"])
def test_the_local_cluster_is_taken_down_also_where_kubeconfig_names_it(
    commands, monkeypatch, capsys, is_named
):
    if is_named:
        monkeypatch.setenv("KUBECONFIG", str(Cluster().kubeconfig))

    assert demo.main(["down"]) == 0

    assert commands == []
    assert "the local cluster is down" in capsys.readouterr().err


def test_of_another_cluster_the_demo_s_own_is_removed_without_any_image(commands, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/somebody/s")

    assert demo.main(["down"]) == 0

    assert {words[0] for words in commands} == {"/somebody/s"}
    assert [words[1] for words in commands] == ["kubectl", "helm", "kubectl"]


def test_another_cluster_needs_images_that_it_can_pull(commands, monkeypatch, capsys):
    monkeypatch.setenv("KUBECONFIG", "/somebody/s")
    monkeypatch.setenv("DEEPSEEK_WORKER_IMAGE", "registry.example/worker:1")

    assert demo.main(["up"]) == 1

    said = capsys.readouterr().err
    assert "DEEPSEEK_OPERATOR_IMAGE must name images" in said
    assert "DEEPSEEK_WORKER_IMAGE must" not in said
    assert commands == []
