"""What documents say exists: links, tests, commands, flags, metrics, fields, reasons, manifests."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import crds
from deepseek_contract.deployment import DeepSeekDeployment
from deepseek_contract.metrics import OPERATOR_METRICS, WORKER_METRICS
from deepseek_contract.status import REASONS, TENANT_REASONS
from deepseek_contract.tenant import DeepSeekTenant
from deepseek_operator.settings import Settings, variable_name
from deepseek_worker.config import EngineConfig, LoadConfig, ServerConfig

ROOT = Path(__file__).resolve().parents[2]
LISTED = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"],
    cwd=ROOT, check=True, capture_output=True, text=True,
).stdout  # fmt: skip
DOCUMENTS = {
    name: (ROOT / name).read_text()
    for name in LISTED.split("\0")
    if name and (ROOT / name).exists()
}
BY_HAND = {name: text for name, text in DOCUMENTS.items() if not name.startswith("docs/reference/")}
KINDS = {"DeepSeekDeployment": DeepSeekDeployment, "DeepSeekTenant": DeepSeekTenant}
# Where people look a condition's reasons up.
PAGE_OF = {"Degraded": "docs/degrade.md", "ScalingActive": "docs/autoscaling.md"}
ON_CALL = "docs/troubleshooting.md"


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(text: str) -> list[str]:
    """Words in backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def found(pattern: str) -> Iterator[tuple[str, str]]:
    """Documents that are written by hand, with each thing in them that the pattern finds."""
    for name, text in BY_HAND.items():
        yield from ((name, match) for match in re.findall(pattern, text))


def fields(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Paths of a schema's fields, as people write them; `*` is any key of a map."""
    for name, part in schema.get("properties", {}).items():
        yield f"{path}{name}"
        if "additionalProperties" in part:
            yield f"{path}{name}.*"
        yield from fields(part.get("items", part), f"{path}{name}.")


def documented_yaml() -> list[tuple[str, dict[str, Any]]]:
    """Objects, and parts of specs, that documents show."""
    return [
        (name, block)
        for name, text in BY_HAND.items()
        for code in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for block in yaml.safe_load_all(code)
    ]


def test_links_lead_to_files_and_headings_that_there_are() -> None:
    dead = []
    for name, text in DOCUMENTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (ROOT / name).parent / path if path else ROOT / name
            if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
                dead.append(f"{name} -> {target}")

    assert dead == []


def test_tests_that_are_named_exist() -> None:
    missing = []
    for document, (file, name) in (
        (name, match)
        for name, text in DOCUMENTS.items()
        for match in re.findall(r"`([a-z0-9_/]+\.py)::([a-z_0-9]+)`", text)
    ):
        path = ROOT / "tests" / file
        if not path.exists() or f"def {name}(" not in path.read_text():
            missing.append(f"{document} -> {file}::{name}")

    assert missing == []


def test_every_decision_is_listed_under_its_title() -> None:
    pages = {name: text for name, text in DOCUMENTS.items() if name.startswith("docs/adr/0")}

    expected = [
        f"{number}. [{text.partition(f'# {number}. ')[2].partition(chr(10))[0]}]({Path(name).name})"
        for number, (name, text) in enumerate(sorted(pages.items()), 1)
    ]

    assert re.findall(r"^\d+\. .*$", DOCUMENTS["docs/adr/README.md"], re.MULTILINE) == expected


def test_programs_and_targets_that_are_named_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

    missing = [
        f"{name}: {path}"
        for name, path in found(r"\bpython3? ((?:benchmarks|tools)/[\w./]+)")
        if not (ROOT / path.rstrip(".")).exists()
    ]
    missing += [
        f"{name}: make {target}"
        for name, text in BY_HAND.items()
        for code in [*spans(text), *re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
        for target in re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)
        if target not in targets
    ]

    assert missing == []


def test_flags_that_are_named_exist() -> None:
    of_models = (EngineConfig, ServerConfig, LoadConfig)
    known = {"--" + name.replace("_", "-") for model in of_models for name in model.model_fields}
    programs = [ROOT / "tools/cluster/command.py", *ROOT.glob("benchmarks/*.py")]
    known |= {
        flag for path in programs for flag in re.findall(r'"(--[a-z-]+)"', path.read_text())
    } | {"--take-ownership"}  # helm's

    unknown = [
        f"{name}: {span}"
        for name, text in BY_HAND.items()
        for span in spans(text)
        if (flag := re.match(r"--[a-z-]+", span)) and flag[0] not in known
    ]

    assert unknown == []


def test_metrics_that_are_named_exist() -> None:
    known = {metric.name for metric in (*WORKER_METRICS, *OPERATOR_METRICS)}
    packages = r"(?!deepseek_(?:contract|operator|worker|kernels)\b)"

    unknown = [
        f"{name}: {metric}"
        for name, metric in found(rf"\b{packages}(deepseek_[a-z_]+)")
        if metric not in known
    ]

    assert unknown == []


def test_environment_variables_that_are_named_exist() -> None:
    known = {variable_name(name) for name in Settings.model_fields}
    for path in (ROOT / "tools").rglob("*.py"):
        known |= set(re.findall(r"DEEPSEEK_[A-Z_]+", path.read_text()))

    assert [pair for pair in found(r"\b(DEEPSEEK_[A-Z_]+)") if pair[1] not in known] == []


def test_fields_that_are_named_exist() -> None:
    known = set()
    for resource in crds.ALL:
        version = crds.custom_resource_definition(resource)["spec"]["versions"][0]
        known |= set(fields(version["schema"]["openAPIV3Schema"], ""))

    unknown = [
        f"{name}: {span}"
        for name, text in BY_HAND.items()
        for span in spans(text)
        if re.fullmatch(r"(spec|status)(\.[A-Za-z]+)+", span)
        and not (ROOT / "operator/deepseek_operator" / span).exists()
        and not {span, re.sub(r"[A-Za-z]+$", "*", span)} & known
    ]

    assert unknown == []


def test_chart_values_that_are_named_exist() -> None:
    values = yaml.safe_load((ROOT / "charts/deepseek-operator/values.yaml").read_text())

    def is_value(path: str) -> bool:
        part: Any = values
        for key in path.split("."):
            if not isinstance(part, dict) or key not in part:
                return False
            part = part[key]
        return True

    unknown = [
        f"{name}: {span}"
        for name, text in BY_HAND.items()
        for span in spans(text)
        if (path := re.match(r"([A-Za-z]+)(\.[A-Za-z]+)+(?==|$)", span))
        and path[1] in values
        and not path[0].endswith((".py", ".yaml"))
        and not is_value(path[0])
    ]

    assert unknown == []


@pytest.mark.parametrize("condition", REASONS)
def test_every_reason_is_explained_to_whoever_is_on_call(condition: str) -> None:
    page = DOCUMENTS[PAGE_OF.get(condition, ON_CALL)]
    if condition not in PAGE_OF:
        page = page.partition(f"\n## {condition}\n")[2].partition("\n## ")[0]
    explained = set(spans("".join(re.findall(r"^\| (`[^|]+)\|", page, re.MULTILINE))))

    assert explained >= set(REASONS[condition])
    if condition not in PAGE_OF:
        assert explained == set(REASONS[condition])


def test_every_reason_of_a_tenant_that_asks_for_something_is_explained() -> None:
    page = DOCUMENTS["docs/tenants.md"].partition("\n## Status\n")[2].partition("\n## ")[0]
    fine = {
        "QuotaDealt", "WithinQuota", "CapHoldsUnits", "NamespacesAreFree", "GuaranteesFit",
        "LabelsAgree",
    }  # fmt: skip

    for condition, reasons in TENANT_REASONS.items():
        assert set(spans(page)) >= {condition, *reasons} - fine


def test_manifests_that_are_shown_are_accepted() -> None:
    shown = documented_yaml()

    assert len(shown) >= 4
    for name, block in shown:
        whole = {
            "apiVersion": "deepseek.dev/v1alpha1",
            "kind": "DeepSeekDeployment",
            "metadata": {"name": "shown"},
            **block,
        }
        try:
            KINDS[whole["kind"]].parse(whole)
        except Exception as error:
            raise AssertionError(f"{name} shows what is refused") from error
