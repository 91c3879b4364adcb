"""The header reader, against the library's writer and against damaged files."""

import gguf
import numpy as np
import pytest

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.weights.gguf_file import GgufFile


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.small", 7)
    writer.add_int64("a.large", -(2**40))
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve 😀")
    writer.add_array("a.words", ["one", "zwei", ""])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.ones((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_every_kind_of_value(path):
    metadata = GgufFile(path).metadata

    assert metadata["general.architecture"] == "llama"
    assert metadata["a.small"] == 7
    assert metadata["a.large"] == -(2**40)
    assert metadata["a.float"] == 0.5
    assert metadata["a.flag"] is True
    assert metadata["a.text"] == "naïve 😀"
    assert metadata["a.words"] == ["one", "zwei", ""]
    assert metadata["a.numbers"] == [1, 2, 3]


def test_places_tensors_with_the_outermost_dimension_first(path):
    file = GgufFile(path)

    tensor = file.tensors["first"]

    assert tensor.shape == (2, 3)
    assert file.data(tensor).view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kept", [0, 3, 10, 60, 200])
def test_a_header_cut_short_is_refused(path, kept):
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(BrokenCheckpoint, match=r"m\.gguf is cut short or no GGUF file"):
        GgufFile(path)


def test_every_prefix_of_the_file_is_refused_and_none_crashes(path):
    content = path.read_bytes()
    for kept in range(0, len(content) - 512, 7):
        path.write_bytes(content[:kept])
        with pytest.raises(BrokenCheckpoint):
            GgufFile(path)


def test_something_else_is_refused(path):
    path.write_bytes(b"PK\x03\x04" + bytes(100))

    with pytest.raises(BrokenCheckpoint, match="begins with b'PK"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda file: file.text("b.none"), "lacks b.none"),
        (lambda file: file.integer("a.text"), "not a positive integer"),
        (lambda file: file.number("a.text"), "not a number"),
    ],
)
def test_missing_and_wrong_values_are_named(path, read, named):
    with pytest.raises(BrokenCheckpoint, match=named):
        read(GgufFile(path))
