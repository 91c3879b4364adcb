import json
from pathlib import Path

from deepseek_worker.errors import ModelTooLarge, NoSpace
from deepseek_worker.termination import MAX_BYTES, write_termination_message


def test_reason_and_message_are_left_as_json(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()

    write_termination_message(NoSpace("needs 5 bytes more"), path)

    assert json.loads(path.read_text()) == {"reason": "NoSpace", "message": "needs 5 bytes more"}


def test_a_long_message_is_cut_to_what_the_kubelet_keeps(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()

    write_termination_message(ModelTooLarge('"é🙂\n' * 5000), path)

    body = path.read_bytes()
    assert MAX_BYTES / 2 < len(body) <= MAX_BYTES
    assert json.loads(body)["message"].endswith("…")


def test_outside_of_kubernetes_no_file_appears(tmp_path: Path) -> None:
    write_termination_message(NoSpace("x"), tmp_path / "nowhere")

    assert list(tmp_path.iterdir()) == []


def test_last_words_that_cannot_be_written_are_no_second_error() -> None:
    write_termination_message(NoSpace("x"), Path("/proc/version"))
