"""Programs are built from modules that name exact versions and no registry."""

import re

import pytest

from cluster import ClusterError, places, programs


@pytest.mark.parametrize("program", programs.PROGRAMS.values(), ids=lambda program: program.name)
def test_each_program_has_an_exact_version(program):
    assert re.fullmatch(r"v\d+(\.\d+\.\d+)?", programs.version(program))


@pytest.mark.parametrize("program", programs.PROGRAMS.values(), ids=lambda program: program.name)
def test_each_program_is_imported_by_its_module(program):
    folder = places.PROGRAM_MODULES / program.module

    sources = "".join(file.read_text() for file in folder.glob("*.go"))

    assert program.package == "." or f'_ "{program.package}"' in sources


def test_every_module_belongs_to_a_program():
    modules = {folder.name for folder in places.PROGRAM_MODULES.iterdir() if folder.is_dir()}

    built = {program.module for program in programs.PROGRAMS.values()}
    assert modules == built | programs.SOURCES.keys()


def test_modules_name_no_registry():
    for file in places.PROGRAM_MODULES.glob("*/go.*"):
        assert not re.search(r"https?://|proxy\.|replace ", file.read_text()), file


@pytest.mark.parametrize(("folder", "module"), programs.SOURCES.items())
def test_sources_have_an_exact_version(folder, module):
    go_mod = (places.PROGRAM_MODULES / folder / "go.mod").read_text()

    assert programs.parse_requirement(go_mod, module)


def test_the_version_is_read_from_a_block_and_from_a_line():
    go_mod = "module x\n\nrequire a.example/one v1.2.3\n\nrequire (\n\ta.example/two v0.1.0\n)\n"

    assert programs.parse_requirement(go_mod, "a.example/one") == "v1.2.3"
    assert programs.parse_requirement(go_mod, "a.example/two") == "v0.1.0"


def test_a_missing_requirement_is_named():
    with pytest.raises(ClusterError, match=r"requires no a\.example/none"):
        programs.parse_requirement("module x\n", "a.example/none")


def test_a_full_disk_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ClusterError, match=r"1048576 GiB are needed.*to try, .* are free"):
        programs.check_disk(tmp_path, 2**50, "try")
