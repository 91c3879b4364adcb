"""Writes every file that is derived from another, or checks that each is as it would be written.

    python tools/generate.py write
    python tools/generate.py --check

`OUTPUTS` is the whole list. Outputs are committed, so that a diff shows what a change means and
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
import text_files  # noqa: E402

CHART = "charts/deepseek-operator"

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
    ]


def write(root: Path = REPOSITORY) -> list[str]:
    """Write what differs, and say which files those were."""
    changed = []
    for path, text in _differing(root):
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        changed.append(path)
    return changed


def check(root: Path = REPOSITORY) -> list[str]:
    """A unified diff for each file that is not as it would be written; nothing is changed."""
    diffs = []
    for path, text in _differing(root):
        target = root / path
        present = target.read_text(encoding="utf-8") if target.exists() else ""
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


def _differing(root: Path) -> list[tuple[str, str]]:
    found = []
    for path, produce in outputs():
        text = produce()
        target = root / path
        if not target.exists() or target.read_bytes() != text.encode():
            found.append((path, text))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", nargs="?", choices=["write"], help="write what differs")
    parser.add_argument("--check", action="store_true", help="change nothing; fail on differences")
    chosen = parser.parse_args(arguments)
    if chosen.check == (chosen.action == "write"):
        parser.error("give either `write` or `--check`")
    if chosen.check:
        diffs = check()
        for diff in diffs:
            print(diff)
        if diffs:
            print(f"{len(diffs)} generated files differ; run: make gen", file=sys.stderr)
        return 1 if diffs else 0
    for path in write():
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
