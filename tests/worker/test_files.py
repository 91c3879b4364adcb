"""What a model's path means."""

import pytest

from deepseek_worker.errors import ModelNotFound
from deepseek_worker.weights.files import find_model


def test_a_gguf_file_is_itself(tmp_path):
    file = tmp_path / "m.gguf"
    file.touch()

    assert find_model(file) == file


def test_a_folder_with_a_config_is_itself_also_beside_a_gguf_file(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "m.gguf").touch()

    assert find_model(tmp_path) == tmp_path


def test_a_folder_with_one_gguf_file_is_that(tmp_path):
    (tmp_path / "m.gguf").touch()
    (tmp_path / "README.md").touch()

    assert find_model(tmp_path) == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "neither a config.json nor a .gguf file"),
        (["a.gguf", "b.gguf"], "name one of them: a.gguf, b.gguf"),
    ],
)
def test_folders_without_one_model_are_refused(names, said, tmp_path):
    for name in names:
        (tmp_path / name).touch()

    with pytest.raises(ModelNotFound, match=said):
        find_model(tmp_path)


def test_other_files_and_nothing_are_refused(tmp_path):
    (tmp_path / "model.bin").touch()

    with pytest.raises(ModelNotFound, match="neither a folder nor"):
        find_model(tmp_path / "model.bin")
    with pytest.raises(ModelNotFound, match="does not exist"):
        find_model(tmp_path / "none")
