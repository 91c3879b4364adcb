"""One file against a real server that cuts, lies, stalls and forgets."""

import errno
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from deepseek_worker.errors import ChecksumMismatch, NoSpace, Unreachable
from deepseek_worker.loading.fetch import PARTS, fetch, require_space
from deepseek_worker.loading.source import RemoteFile
from deepseek_worker.loading.transport import Patience, Transport

CONTENT = random.Random(1).randbytes(300_000)
NAME = "model.gguf"
QUICK = Patience(
    connect_seconds=1,
    read_seconds=0.2,
    slow_seconds=0.3,
    slow_bytes_per_second=10_000,
    attempts=3,
    backoff_seconds=0.001,
)


def remote(url: str, **known: Any) -> RemoteFile:
    return RemoteFile(NAME, url, **{"digest": hashlib.sha256(CONTENT).hexdigest(), **known})


def get(file: RemoteFile, folder: Path) -> int:
    there: list[int] = []
    size = fetch(file, folder, Transport(patience=QUICK), there.append)
    assert sum(there) == size == len(CONTENT)
    assert (folder / NAME).read_bytes() == CONTENT
    assert list((folder / PARTS).iterdir()) == []
    return size


def ranges(origin: Any) -> list[str | None]:
    return [headers.get("range") for _, headers in origin.asked]


def test_a_file_comes_whole_under_its_name(origin: Any, tmp_path: Path) -> None:
    get(remote(origin.put("/m", CONTENT), size_bytes=len(CONTENT)), tmp_path)

    assert ranges(origin) == [None]


def test_a_cut_download_goes_on_where_it_was_cut(origin: Any, tmp_path: Path) -> None:
    url = origin.put("/m", CONTENT, origin.fault.cut_after(100_000), origin.fault.cut_after(90_000))

    get(remote(url), tmp_path)

    assert ranges(origin) == [None, "bytes=100000-", "bytes=190000-"]


def test_another_process_goes_on_with_what_an_earlier_one_left(origin: Any, tmp_path: Path) -> None:
    cut = origin.fault.cut_after(100)
    url = origin.put("/m", CONTENT, origin.fault.cut_after(200_000), cut, cut)
    with pytest.raises(Unreachable, match="gave up after 3 attempts"):
        fetch(remote(url), tmp_path, Transport(patience=QUICK), lambda _: None)
    assert not (tmp_path / NAME).exists()

    get(remote(url), tmp_path)

    assert ranges(origin)[-1] == f"bytes={200_000 + 200}-"


def test_a_server_without_ranges_is_read_from_the_start_again(origin: Any, tmp_path: Path) -> None:
    url = origin.put("/m", CONTENT, origin.fault.cut_after(100_000), origin.fault.without_ranges)

    get(remote(url), tmp_path)


def test_a_file_that_changed_on_the_server_is_not_glued_to_its_old_half(
    origin: Any, tmp_path: Path
) -> None:
    old = random.Random(2).randbytes(300_000)

    def cut_old(handler: Any, _: bytes) -> None:
        origin.fault.cut_after(100_000)(handler, old)

    get(remote(origin.put("/m", CONTENT, cut_old)), tmp_path)

    assert [headers.get("if-range") for _, headers in origin.asked] == [
        None,
        f'"{hashlib.md5(old).hexdigest()}"',
    ]


def test_a_range_beyond_the_end_starts_over(origin: Any, tmp_path: Path) -> None:
    url = origin.put("/m", CONTENT, origin.fault.cut_after(100_000), origin.fault.status(416))

    get(remote(url), tmp_path)

    assert ranges(origin) == [None, "bytes=100000-", None]


def test_a_damaged_part_on_disk_costs_one_more_download_not_the_model(
    origin: Any, tmp_path: Path
) -> None:
    file = remote(origin.put("/m", CONTENT))
    (tmp_path / PARTS).mkdir()
    (tmp_path / PARTS / f"{NAME}.part").write_bytes(b"\0" * 1000)
    (tmp_path / PARTS / f"{NAME}.json").write_text(json.dumps({"digest": file.digest}))

    get(file, tmp_path)

    assert ranges(origin) == ["bytes=1000-", None]


def test_a_part_of_another_file_is_thrown_away(origin: Any, tmp_path: Path) -> None:
    (tmp_path / PARTS).mkdir()
    (tmp_path / PARTS / f"{NAME}.part").write_bytes(b"\0" * 1000)
    (tmp_path / PARTS / f"{NAME}.json").write_text("cut in the mid")

    get(remote(origin.put("/m", CONTENT)), tmp_path)

    assert ranges(origin) == [None]


def test_wrong_bytes_are_deleted_and_named(origin: Any, tmp_path: Path) -> None:
    url = origin.put("/m", CONTENT[:-1] + b"!")

    with pytest.raises(ChecksumMismatch) as mismatch:
        fetch(remote(url), tmp_path, Transport(patience=QUICK), lambda _: None)

    assert hashlib.sha256(CONTENT).hexdigest() in str(mismatch.value)
    assert not (tmp_path / NAME).exists()
    assert not (tmp_path / PARTS / f"{NAME}.part").exists()
    assert len(origin.asked) == 1


def test_a_wrong_size_is_refused_before_the_bytes_come(origin: Any, tmp_path: Path) -> None:
    url = origin.put("/m", CONTENT)

    with pytest.raises(ChecksumMismatch, match="offers 300000 bytes, 5 were promised"):
        fetch(remote(url, size_bytes=5), tmp_path, Transport(patience=QUICK), lambda _: None)


def test_git_files_are_verified_by_their_git_name(origin: Any, tmp_path: Path) -> None:
    digest = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()
    url = origin.put("/m", CONTENT)

    get(remote(url, digest=digest, digest_kind="git-sha1", size_bytes=len(CONTENT)), tmp_path)


def test_what_is_there_and_right_is_not_asked_for(origin: Any, tmp_path: Path) -> None:
    file = remote(origin.put("/m", CONTENT))
    (tmp_path / NAME).write_bytes(CONTENT)

    assert fetch(file, tmp_path, Transport(patience=QUICK), lambda _: None) == len(CONTENT)

    assert origin.asked == []


def test_what_is_there_and_wrong_is_replaced(origin: Any, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"an older model")

    get(remote(origin.put("/m", CONTENT)), tmp_path)


@pytest.mark.parametrize("fault", ["silent", "slow"])
def test_a_server_that_stalls_is_asked_again(origin: Any, tmp_path: Path, fault: str) -> None:
    stalled = origin.fault.silent_for(0.5) if fault == "silent" else origin.fault.trickle(100, 0.05)

    get(remote(origin.put("/m", CONTENT, stalled)), tmp_path)

    assert len(origin.asked) == 2


def test_a_model_larger_than_the_disk_is_refused_before_it_comes(
    origin: Any, tmp_path: Path
) -> None:
    def huge(handler: Any, content: bytes) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(10**18))
        handler.end_headers()
        handler.close_connection = True

    with pytest.raises(NoSpace, match=r"needs 1000000000000000000 more bytes, .* use a larger"):
        fetch(
            remote(origin.put("/m", CONTENT, huge)),
            tmp_path,
            Transport(patience=QUICK),
            lambda _: None,
        )


def test_a_disk_that_fills_up_while_loading_is_named(origin: Any, tmp_path: Path) -> None:
    (tmp_path / PARTS).mkdir()
    # Every write to /dev/full fails as on a full disk.
    (tmp_path / PARTS / f"{NAME}.part").symlink_to("/dev/full")
    file = remote(origin.put("/m", CONTENT))
    (tmp_path / PARTS / f"{NAME}.json").write_text(json.dumps({"digest": file.digest}))

    with pytest.raises(NoSpace, match="is full") as full:
        fetch(file, tmp_path, Transport(patience=QUICK), lambda _: None)

    assert isinstance(full.value.__cause__, OSError)
    assert full.value.__cause__.errno == errno.ENOSPC


def test_what_fits_is_not_refused(tmp_path: Path) -> None:
    require_space(tmp_path, 1)
