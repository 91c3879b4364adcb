"""Every folder of manifests/examples does, applied as it is written, what it says."""

import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from site_under_test import ROOT, Namespace, Site, Tenants, eventually

pytestmark = pytest.mark.e2e

EXAMPLES = sorted(path for path in (ROOT / "manifests/examples").iterdir() if path.is_dir())


@dataclass(frozen=True)
class Expected:
    """What an example says of itself in `expect.toml`."""

    document: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> "Expected":
        return cls(tomllib.loads((folder / "expect.toml").read_text()))

    @property
    def lacking(self) -> str | None:
        """What this cluster lacks: its pods reach no other network, and its nodes have no GPUs."""
        keys = ("without_internet", "without_gpus")
        return next((key for key in keys if key in self.document), None)

    @property
    def conditions(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = (
            self.document[self.lacking] if self.lacking else self.document
        )["conditions"]
        return found

    @property
    def gives_up(self) -> bool:
        """Whether a download has to fail, which takes a loader a minute and a half."""
        return self.conditions.get("ModelCached", {}).get("reason") == "DownloadFailed"


PATIENT = [folder for folder in EXAMPLES if Expected.of(folder).gives_up]
QUICK = [folder for folder in EXAMPLES if folder not in PATIENT]


@pytest.fixture(scope="module", autouse=True)
def begun(site: Site) -> Iterator[dict[Path, Namespace]]:
    """The examples that give up, all begun at once: the others have their turn meanwhile."""
    with ExitStack() as places:
        found = {folder: places.enter_context(site.place(folder.name)) for folder in PATIENT}
        for folder, namespace in found.items():
            apply(namespace, folder, Expected.of(folder).document.get("worker_image"))
        yield found


@pytest.mark.parametrize("folder", QUICK, ids=lambda folder: folder.name)
def test_an_example_does_what_it_says(namespace: Namespace, folder: Path) -> None:
    apply(namespace, folder, Expected.of(folder).document.get("worker_image"))

    does_what_it_says(namespace, Expected.of(folder))


@pytest.mark.parametrize("folder", PATIENT, ids=lambda folder: folder.name)
def test_an_example_that_gives_up_does_what_it_says(
    begun: dict[Path, Namespace], folder: Path
) -> None:
    does_what_it_says(begun[folder], Expected.of(folder))


def does_what_it_says(namespace: Namespace, example: Expected) -> None:
    expected = example.document
    looked_at = namespace if "object" in expected else Tenants(namespace.site, namespace.name)
    name = expected.get("object") or expected["tenant"]
    for kind, condition in example.conditions.items():
        looked_at.wait_reason(name, condition["reason"], kind, expected["within_seconds"])
        assert looked_at.condition(name, kind)["status"] == condition["status"]
    if example.lacking:
        return
    namespace.wait_replicas(expected["object"], expected["ready_replicas"])
    if "ask" in expected:
        question = expected["ask"]
        answer = eventually(
            lambda: ask(namespace, expected["object"], question, question.get("api_key")),
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
