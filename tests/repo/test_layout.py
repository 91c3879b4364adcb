"""The shape of the tree: what a newcomer relies on to find things."""

import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "contract": ROOT / "contract/deepseek_contract",
    "operator": ROOT / "operator/deepseek_operator",
    "worker": ROOT / "worker/deepseek_worker",
    "kernels": ROOT / "kernels/deepseek_kernels",
}
# A module whose behaviour is only visible through another one names the test that shows it.
TESTED_ELSEWHERE = {
    "contract/__init__.py",
    "operator/__init__.py",
    "worker/__init__.py",
    "kernels/__init__.py",
    # tests/worker/test_graph_runner.py, which holds both against the reference.
    "worker/layers/paged.py",
    "worker/step_arrays.py",
}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]


def test_no_folder_shadows_the_standard_library_module_operator() -> None:
    assert not (ROOT / "operator/__init__.py").exists()
    assert not (ROOT / "tests/operator/__init__.py").exists()
    assert hasattr(operator, "itemgetter")


def test_tests_are_not_packages() -> None:
    assert tracked("tests/**/__init__.py") == []


@pytest.mark.parametrize("package", ["contract", "operator", "worker"])
def test_every_module_has_a_test_file_of_its_name(package: str) -> None:
    names = {path.name for path in (ROOT / "tests" / package).rglob("test_*.py")}
    modules = [
        path.relative_to(PACKAGES[package])
        for path in tracked(f"{package}/deepseek_{package}/*.py")
        if path.name != "__init__.py"
    ]

    missing = [
        str(module)
        for module in modules
        if f"test_{module.stem}.py" not in names
        and f"test_{'_'.join(module.with_suffix('').parts)}.py" not in names
        and f"{package}/{module}" not in TESTED_ELSEWHERE
    ]

    assert missing == []


def test_every_kernel_has_a_reference_beside_it_and_a_test() -> None:
    for kernel in tracked("kernels/deepseek_kernels/*/kernel.py"):
        assert (kernel.parent / "reference.py").exists(), kernel
        assert (ROOT / f"tests/kernels/test_{kernel.parent.name}.py").exists(), kernel


def test_locks_hold_versions_and_hashes_but_no_download_address() -> None:
    for lock in tracked("requirements/*.txt"):
        text = lock.read_text()
        assert "://" not in text, lock
        pinned = re.findall(r"^([A-Za-z0-9_.-]+)==", text, re.MULTILINE)
        assert pinned, lock
        assert text.count("--hash=sha256:") >= len(pinned), lock
    assert not (ROOT / "uv.lock").exists()


def test_the_images_run_the_versions_that_are_tested() -> None:
    def versions(name: str) -> dict[str, str]:
        text = (ROOT / f"requirements/{name}.txt").read_text()
        return dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\\n]+)", text, re.MULTILINE))

    tested = versions("dev")
    for image in ("operator", "torch", "worker"):
        differing = {
            name: (version, tested.get(name))
            for name, version in versions(image).items()
            if tested.get(name) != version
        }
        assert differing == {}, image


def test_ci_runs_the_command_that_the_readme_names() -> None:
    command = re.findall(r"^exec (make [a-z-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)

    assert command == ["make test"]
    assert "make test" in (ROOT / "README.md").read_text()


def test_what_a_fixture_takes_to_build_is_not_of_the_time_of_its_test(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "import time\nimport pytest\n\n\n@pytest.fixture\ndef program():\n    time.sleep(1.5)\n"
        "\n\ndef test_it(program):\n    pass\n"
    )

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-o", "timeout=1", file],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
