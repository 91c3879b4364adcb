"""Every example validates, says what to expect, and its expectation can be read by a machine."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepseek_contract.deployment import DeepSeekDeployment
from deepseek_contract.status import REASONS, TENANT_REASONS
from deepseek_contract.tenant import DeepSeekTenant

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path for path in (ROOT / "manifests/examples").iterdir() if path.is_dir())
KEYS = {
    "object",
    "tenant",
    "within_seconds",
    "ready_replicas",
    "conditions",
    "without_internet",
    "without_gpus",
    "ask",
    "refused_without_key",
    "worker_image",
}
COLLECTIONS = {
    "Namespace": "/api/v1/namespaces",
    "DeepSeekTenant": "/apis/deepseek.dev/v1alpha1/deepseektenants",
    "DeepSeekDeployment": "/apis/deepseek.dev/v1alpha1/namespaces/restricted/deepseekdeployments",
    "Secret": "/api/v1/namespaces/restricted/secrets",
    "PersistentVolumeClaim": "/api/v1/namespaces/restricted/persistentvolumeclaims",
    "Job": "/apis/batch/v1/namespaces/restricted/jobs",
}

each_example = pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)


def manifests(folder: Path) -> list[dict[str, Any]]:
    return [
        document
        for path in sorted(folder.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def expectation(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "expect.toml").read_text())


@each_example
def test_its_objects_are_accepted(folder: Path) -> None:
    kinds: dict[str, type[DeepSeekDeployment | DeepSeekTenant]] = {
        "object": DeepSeekDeployment,
        "tenant": DeepSeekTenant,
    }
    expected = expectation(folder)
    (key,) = expected.keys() & kinds

    names = [
        kinds[key].parse(document).metadata.name
        for document in manifests(folder)
        if document["kind"] == kinds[key].__name__
    ]

    assert expected[key] in names


@each_example
def test_its_readme_says_how_to_apply_it(folder: Path) -> None:
    readme = (folder / "README.md").read_text()

    assert f"kubectl apply --server-side -f manifests/examples/{folder.name}" in readme
    assert f"[{folder.name}]({folder.name})" in (folder.parent / "README.md").read_text()


@each_example
def test_kubectl_finds_only_manifests_in_it(folder: Path) -> None:
    others = {path.name for path in folder.iterdir() if path.suffix != ".yaml"}

    assert others == {"README.md", "expect.toml"}


@each_example
def test_what_it_expects_can_happen(folder: Path) -> None:
    expected = expectation(folder)
    text = "".join(path.read_text() for path in folder.glob("*.yaml"))

    assert expected.keys() <= KEYS
    assert 0 < expected["within_seconds"] <= 1200
    conditions = {
        **expected["conditions"],
        **expected.get("without_internet", {}).get("conditions", {}),
        **expected.get("without_gpus", {}).get("conditions", {}),
    }
    reasons: Mapping[str, tuple[str, ...]] = TENANT_REASONS if "tenant" in expected else REASONS
    for kind, condition in conditions.items():
        assert condition["reason"] in reasons[kind]
        assert condition["status"] in {"True", "False"}
    if "ask" in expected:
        assert {"prompt", "contains"} <= expected["ask"].keys()
        assert expected["conditions"]["Ready"]["status"] == "True"
    assert expected.get("worker_image", "") in text


@pytest.mark.control_plane
@each_example
def test_the_api_server_takes_it_under_restricted_pod_security(
    api_server: Any, folder: Path
) -> None:
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": "restricted",
            "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
        },
    }
    api_server.create("/api/v1/namespaces", namespace, dry_run=False)

    for manifest in manifests(folder):
        answer = api_server.create(COLLECTIONS[manifest["kind"]], manifest)

        assert answer.is_accepted, answer.message
        if manifest["kind"] == "Job":
            template = manifest["spec"]["template"]
            pod = json.loads(json.dumps(template)) | {"apiVersion": "v1", "kind": "Pod"}
            pod["metadata"] = {"name": "of-the-job"}
            pod["spec"]["serviceAccountName"] = "default"
            account = {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default"},
            }
            accounts = "/api/v1/namespaces/restricted/serviceaccounts"
            api_server.create(accounts, account, dry_run=False)
            answer = api_server.create("/api/v1/namespaces/restricted/pods", pod)
            assert answer.is_accepted, answer.message
