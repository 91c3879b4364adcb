"""Every folder of manifests/examples does, applied as it is written, what it says."""

import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from site_under_test import ROOT, Namespace, eventually

pytestmark = pytest.mark.e2e

EXAMPLES = sorted(path for path in (ROOT / "manifests/examples").iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_an_example_does_what_it_says(namespace: Namespace, folder: Path) -> None:
    expected = tomllib.loads((folder / "expect.toml").read_text())
    # Pods of the local cluster reach no other network.
    is_cut_off = "without_internet" in expected
    conditions = expected["without_internet" if is_cut_off else "conditions"]
    conditions = conditions["conditions"] if is_cut_off else conditions

    apply(namespace, folder, expected.get("worker_image"))

    for kind, condition in conditions.items():
        namespace.wait_reason(
            expected["object"], condition["reason"], expected["within_seconds"], kind
        )
        assert namespace.condition(expected["object"], kind)["status"] == condition["status"]
    if is_cut_off:
        return
    namespace.wait_replicas(expected["object"], expected["ready_replicas"])
    if "ask" in expected:
        question = expected["ask"]
        answer = eventually(
            lambda: ask(namespace, expected["object"], question, question.get("api_key")),
            60,
            "an answer",
        )
        assert answer.status_code == 200, answer.text
        assert question["contains"] in answer.json()["choices"][0]["text"]
        if expected.get("refused_without_key"):
            assert ask(namespace, expected["object"], question, None).status_code == 401


def apply(namespace: Namespace, folder: Path, worker_image: str | None) -> None:
    """Apply a folder, with the installation's worker image in the place of its stand-in."""
    if worker_image is None:
        namespace.kubectl("apply", "--server-side", "-f", str(folder))
        return
    texts = [path.read_text() for path in sorted(folder.glob("*.yaml"))]
    document = "\n---\n".join(texts).replace(worker_image, namespace.site.target.worker_image)
    namespace.kubectl("apply", "--server-side", "-f", "-", stdin=document)


def ask(
    namespace: Namespace, name: str, question: dict[str, Any], api_key: str | None
) -> httpx.Response:
    return httpx.post(
        f"{namespace.url(name)}/completions",
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        json={
            "model": question.get("model", name),
            "prompt": question["prompt"],
            "max_tokens": 8,
            "temperature": 0,
        },
        timeout=60,
    )
