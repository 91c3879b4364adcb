"""Images as files: what is added can be read as OCI, and nothing is sent twice."""

import io
import json
import tarfile

import pytest

from cluster.oci import Layout, link

ONE, TWO = "localhost/one:v1", "localhost/two:v1"


@pytest.fixture
def layout(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF one")
    layout = Layout(tmp_path / "layout")
    layout.add(ONE, {"/bin/one": program}, ["/bin/one"], 65532)
    return layout


def sent(layout, references, present=()):
    target = io.BytesIO()
    layout.send(references, present, target)
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive.getmembers()}


def test_an_archive_holds_the_whole_image(layout):
    files = sent(layout, [ONE])

    (described,) = json.loads(files["index.json"])["manifests"]
    assert described["annotations"] == {"io.containerd.image.name": ONE}
    manifest = json.loads(files[blob(described["digest"])])
    config = json.loads(files[blob(manifest["config"]["digest"])])
    assert config["config"]["Entrypoint"] == ["/bin/one"]
    assert config["config"]["User"] == "65532:0"
    (layer,) = manifest["layers"]
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]
    with tarfile.open(fileobj=io.BytesIO(files[blob(layer["digest"])])) as content:
        (member,) = content.getmembers()
        assert (member.name, member.mode) == ("bin/one", 0o755)


def test_content_that_is_there_is_not_sent(layout):
    present = layout.digests([ONE])

    assert sent(layout, [ONE], present).keys() == {"oci-layout", "index.json"}


def test_the_same_files_give_the_same_image(layout, tmp_path):
    before = layout.digests([ONE])

    layout.add(ONE, {"/bin/one": tmp_path / "program"}, ["/bin/one"], 65532)

    assert layout.digests([ONE]) == before


def test_removing_an_image_keeps_what_another_needs(layout, tmp_path):
    layout.add(TWO, {"/bin/one": tmp_path / "program"}, ["/bin/one", "--two"], 65532)
    kept = layout.digests([TWO])

    layout.remove([ONE])

    assert layout.references() == {TWO}
    assert {f"sha256:{file.name}" for file in (layout.folder / "blobs/sha256").iterdir()} == kept


def test_an_empty_folder_holds_no_images(tmp_path):
    assert Layout(tmp_path / "none").references() == set()


def test_a_link_replaces_a_copy(tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.write_text("same")
    copy.write_text("same")

    link(original, copy)

    assert copy.samefile(original)


def blob(digest):
    return f"blobs/{digest.replace(':', '/')}"
