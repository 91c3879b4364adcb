"""Whole downloads into one folder: once, resumed, beside another loader."""

import fcntl
import hashlib
import json
import logging
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deepseek_worker.config import LoadConfig
from deepseek_worker.errors import (
    ChecksumMismatch,
    CredentialsRefused,
    InvalidFlags,
    NoSpace,
    Unreachable,
)
from deepseek_worker.loading.loader import LOCK, MARKER, load
from deepseek_worker.loading.transport import Patience

QUICK = Patience(connect_seconds=1, read_seconds=1, attempts=2, backoff_seconds=0.001)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": random.Random(1).randbytes(50_000),
    "README.md": b"not needed",
}


def run(origin: Any, folder: Path, **options: Any) -> None:
    config = LoadConfig(
        source="hf://deepseek-ai/tiny", destination=folder, hf_endpoint=origin.url, **options
    )
    load(config, QUICK)


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_repository_is_had_with_a_marker_that_says_what_it_is(
    origin: Any, tmp_path: Path
) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)

    run(origin, tmp_path / "cache")

    assert visible(tmp_path / "cache") == {"config.json", "tokenizer.json", "model.safetensors"}
    marker = json.loads((tmp_path / "cache" / MARKER).read_text())
    assert (marker["source"], marker["revision"]) == ("hf://deepseek-ai/tiny@main", "c0ffee")
    assert {file["name"]: file["size_bytes"] for file in marker["files"]}[
        "model.safetensors"
    ] == 50_000
    assert {path.name for path in (tmp_path / "cache").iterdir()} - visible(tmp_path / "cache") == {
        MARKER,
        LOCK,
    }


def test_a_second_run_asks_nobody_anything(origin: Any, tmp_path: Path) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    run(origin, tmp_path)
    origin.asked.clear()
    origin.files.clear()

    run(origin, tmp_path)

    assert origin.asked == []


def test_a_file_that_was_removed_is_had_again_alone(origin: Any, tmp_path: Path) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    run(origin, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    origin.asked.clear()

    run(origin, tmp_path)

    assert [path.rpartition("/")[2] for path in origin.paths()] == [
        "main?blobs=true",
        "tokenizer.json",
    ]


def test_a_run_after_a_failure_goes_on_and_keeps_what_was_whole(
    origin: Any, tmp_path: Path
) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    weights = "/deepseek-ai/tiny/resolve/c0ffee/model.safetensors"
    origin.faults[weights].append(origin.fault.instead(b"x" * 50_000))
    with pytest.raises(ChecksumMismatch, match=r"model\.safetensors"):
        run(origin, tmp_path)
    assert not (tmp_path / MARKER).exists()

    run(origin, tmp_path)

    assert (tmp_path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert (tmp_path / MARKER).exists()


def test_another_source_replaces_the_files_of_the_first(origin: Any, tmp_path: Path) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    run(origin, tmp_path)
    (tmp_path / "notes.txt").write_text("not the loader's")
    origin.put_repository("deepseek-ai/other", {"m-Q8_0.gguf": b"GGUF"})

    load(
        LoadConfig(source="hf://deepseek-ai/other", destination=tmp_path, hf_endpoint=origin.url),
        QUICK,
    )

    assert visible(tmp_path) == {"m-Q8_0.gguf", "notes.txt"}


def test_a_loader_that_finds_another_at_work_waits_and_downloads_nothing(
    origin: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    caplog.set_level(logging.INFO)
    second = threading.Thread(target=run, args=(origin, tmp_path))
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        deadline = time.monotonic() + 60
        while "Another loader is at work here; waiting for it" not in caplog.messages:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert second.is_alive()
        assert origin.asked == []
        # As the first one would leave it.
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        (tmp_path / MARKER).write_text(
            json.dumps(
                {
                    "source": "hf://deepseek-ai/tiny@main",
                    "files": [{"name": "m.gguf", "size_bytes": 4}],
                }
            )
        )

    second.join(60)

    assert origin.asked == []
    assert [record.message for record in caplog.records] == [
        "Another loader is at work here; waiting for it",
        "Model is complete already",
    ]


def test_a_private_repository_needs_a_token_and_says_so(origin: Any, tmp_path: Path) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    origin.token = "hf_right"
    with pytest.raises(CredentialsRefused, match=r"give a token .*--token-file"):
        run(origin, tmp_path / "cache")
    token_file = tmp_path / "token"
    token_file.write_text("hf_right\n")

    run(origin, tmp_path / "cache", token_file=token_file)

    assert (tmp_path / "cache" / MARKER).exists()


def test_a_token_file_that_cannot_be_read_is_told_before_anything_is_asked(
    origin: Any, tmp_path: Path
) -> None:
    with pytest.raises(InvalidFlags, match=r"--token-file .*nowhere"):
        run(origin, tmp_path / "cache", token_file=tmp_path / "nowhere")

    assert origin.asked == []


def test_a_model_that_cannot_fit_is_refused_before_its_first_byte(
    origin: Any, tmp_path: Path
) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    path = "/api/models/deepseek-ai/tiny/revision/main?blobs=true"
    information = json.loads(origin.files[path])
    for sibling in information["siblings"]:
        if sibling["rfilename"] == "model.safetensors":
            sibling["lfs"]["size"] = 10**18
    origin.files[path] = json.dumps(information).encode()

    with pytest.raises(NoSpace, match="use a larger"):
        run(origin, tmp_path)

    assert origin.paths() == [path]


def test_an_address_is_downloaded_and_verified(secure_origin: Any, tmp_path: Path) -> None:
    url = secure_origin.put("/models/tiny.gguf?signature=s", b"GGUF and more")
    digest = hashlib.sha256(b"GGUF and more").hexdigest()
    config = LoadConfig(source=f"{url}#sha256={digest}", destination=tmp_path / "cache")

    load(config, QUICK, authority=secure_origin.certificate)

    assert (tmp_path / "cache/tiny.gguf").read_bytes() == b"GGUF and more"
    assert "signature" not in (tmp_path / "cache" / MARKER).read_text()


def test_a_server_that_nobody_vouches_for_is_not_trusted(
    secure_origin: Any, tmp_path: Path
) -> None:
    url = secure_origin.put("/tiny.gguf", b"GGUF")
    config = LoadConfig(source=f"{url}#sha256={'0' * 64}", destination=tmp_path / "cache")

    with pytest.raises(Unreachable, match=r"no trusted connection .*certificateAuthority"):
        load(config, QUICK)

    assert secure_origin.asked == []


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_an_authority_that_is_none_is_told_before_anything_is_asked(
    secure_origin: Any, tmp_path: Path, content: str | None
) -> None:
    url = secure_origin.put("/tiny.gguf", b"GGUF")
    config = LoadConfig(source=f"{url}#sha256={'0' * 64}", destination=tmp_path / "cache")
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)

    with pytest.raises(InvalidFlags, match=r"SSL_CERT_FILE .*ca\.pem"):
        load(config, QUICK, authority=tmp_path / "ca.pem")


def test_a_marker_that_is_rubbish_means_not_complete(origin: Any, tmp_path: Path) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    (tmp_path / MARKER).write_text("{")

    run(origin, tmp_path)

    assert json.loads((tmp_path / MARKER).read_text())["revision"] == "c0ffee"


def test_what_is_verified_is_what_the_hub_promised(origin: Any, tmp_path: Path) -> None:
    origin.put_repository("deepseek-ai/tiny", FILES)
    tampered = "/deepseek-ai/tiny/resolve/c0ffee/config.json"
    origin.files[tampered] = b'{"model_type": "qwen2"}'
    assert len(origin.files[tampered]) == len(FILES["config.json"])

    with pytest.raises(ChecksumMismatch) as mismatch:
        run(origin, tmp_path)

    header = b"blob %d\0" % len(FILES["config.json"])
    assert hashlib.sha1(header + FILES["config.json"]).hexdigest() in str(mismatch.value)
