"""Writes every file that is derived from another, or checks that each is as it would be written.

    python tools/generate.py            # write
    python tools/generate.py --check    # change nothing, fail on differences

`outputs` is the whole list. They are committed, so that a diff shows what a change means and
nobody needs the tools to read or install the result.
"""

import argparse
import difflib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
for part in ("tools", "contract", "operator", "worker"):
    sys.path.insert(0, str(REPOSITORY / part))

import chart_values  # noqa: E402
import crds  # noqa: E402
import kernel_rows  # noqa: E402
import metrics_files  # noqa: E402
import performance  # noqa: E402
import reference  # noqa: E402
import rendering  # noqa: E402
import text_files  # noqa: E402

CHART = "charts/deepseek-operator"
REFERENCE = "docs/reference"

Output = tuple[str, Callable[[], str]]


def outputs() -> list[Output]:
    """Each generated file's path below the repository, and what writes its text."""
    listed: list[Output] = []
    for resource in crds.ALL:
        name = resource.plural
        listed += [
            (f"manifests/crds/{name}.yaml", partial(text_files.crd, resource)),
            (f"{CHART}/templates/crd-{name}.yaml", partial(text_files.chart_crd, resource)),
        ]
    return [
        *listed,
        (f"{CHART}/values.yaml", chart_values.values_yaml),
        (f"{CHART}/values.schema.json", chart_values.schema_json),
        (f"{CHART}/templates/_settings.tpl", chart_values.settings_template),
        (f"{CHART}/templates/_permissions.tpl", chart_values.permissions_template),
        (f"{CHART}/files/scrape-config.yaml", metrics_files.scrape_config),
        (f"{CHART}/files/adapter-config.yaml", metrics_files.adapter_config),
        (f"{CHART}/files/adapter-values.yaml", metrics_files.adapter_values),
        (f"{REFERENCE}/deepseekdeployment.md", partial(reference.deployment_page, crds.DEPLOYMENT)),
        (f"{REFERENCE}/deepseektenant.md", partial(reference.tenant_page, crds.TENANT)),
        (f"{REFERENCE}/metrics.md", reference.metrics_page),
        (f"{REFERENCE}/settings.md", reference.settings_page),
        (f"{REFERENCE}/values.md", reference.values_page),
        (f"{REFERENCE}/worker.md", reference.worker_page),
        (f"{REFERENCE}/openapi.json", reference.openapi_document),
        ("docs/performance.md", performance.page),
        ("kernels/README.md", kernel_rows.readme),
        # Last, since it reads what the chart's generators have written.
        *(
            (f"manifests/rendered/{scope}.yaml", partial(rendering.rendered, scope))
            for scope in rendering.SCOPES
        ),
    ]


def write(root: Path = REPOSITORY, listed: list[Output] | None = None) -> list[str]:
    """Write what differs, and say which files those were."""
    changed = []
    for path, produce in listed or outputs():
        text = produce()
        target = root / path
        if _differs(target, text):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def check(root: Path = REPOSITORY, listed: list[Output] | None = None) -> list[str]:
    """A unified diff for each file that is not as it would be written; nothing is changed."""
    diffs = []
    for path, produce in listed or outputs():
        text = produce()
        if not _differs(root / path, text):
            continue
        present = (root / path).read_text(encoding="utf-8") if (root / path).exists() else ""
        lines = difflib.unified_diff(
            present.splitlines(),
            text.splitlines(),
            f"{path} (committed)",
            f"{path} (generated)",
            lineterm="",
            n=1,
        )
        diffs.append("\n".join(lines) or f"{path}: differs in its line ends")
    return diffs


def _differs(target: Path, text: str) -> bool:
    return not target.exists() or target.read_bytes() != text.encode()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail on differences")
    if not parser.parse_args(arguments).check:
        for path in write():
            print(f"wrote {path}")
        return 0
    diffs = check()
    for diff in diffs:
        print(diff)
    if diffs:
        print(f"{len(diffs)} generated files differ; run: make gen", file=sys.stderr)
    return 1 if diffs else 0


if __name__ == "__main__":
    sys.exit(main())
