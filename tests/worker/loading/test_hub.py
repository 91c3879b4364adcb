import json
from typing import Any

import pytest

from deepseek_contract.source import HubSource
from deepseek_worker.errors import SourceError, SourceNotFound, Unreachable
from deepseek_worker.loading.hub import list_files
from deepseek_worker.loading.source import INDEX
from deepseek_worker.loading.transport import Patience, Transport

MODEL = HubSource("deepseek-ai/tiny", None)


def listed(origin: Any, source: HubSource = MODEL) -> tuple[str, list[str]]:
    patience = Patience(attempts=3, backoff_seconds=0.001, read_seconds=1)
    commit, files = list_files(source, origin.url + "/", Transport(patience=patience))
    return commit, [file.name for file in files]


def test_a_branch_is_pinned_to_the_commit_it_means_now(origin: Any) -> None:
    origin.put_repository(
        "deepseek-ai/tiny",
        {"model.safetensors": b"w", "config.json": b"{}"},
        commit="0123abc",
        revision="refs%2Fpr%2F1",
    )
    source = HubSource("deepseek-ai/tiny", "refs/pr/1")

    _, files = list_files(source, origin.url, Transport())

    assert [file.url for file in files] == [
        f"{origin.url}/deepseek-ai/tiny/resolve/0123abc/config.json",
        f"{origin.url}/deepseek-ai/tiny/resolve/0123abc/model.safetensors",
    ]


def test_the_index_is_read_to_know_the_shards(origin: Any) -> None:
    index = json.dumps({"weight_map": {"a": "one.safetensors"}}).encode()
    origin.put_repository(
        "deepseek-ai/tiny",
        {"one.safetensors": b"1", "two.safetensors": b"2", INDEX: index},
    )

    assert listed(origin) == ("c0ffee", [INDEX, "one.safetensors"])


def test_a_hub_that_is_down_for_a_moment_is_asked_again(origin: Any) -> None:
    origin.put_repository("deepseek-ai/tiny", {"m.gguf": b"1"})
    path = "/api/models/deepseek-ai/tiny/revision/main?blobs=true"
    origin.faults[path].extend([origin.fault.status(503), origin.fault.cut_after(5)])

    assert listed(origin) == ("c0ffee", ["m.gguf"])


def test_a_hub_that_stays_down_is_unreachable(origin: Any) -> None:
    origin.put_repository("deepseek-ai/tiny", {"m.gguf": b"1"})
    path = "/api/models/deepseek-ai/tiny/revision/main?blobs=true"
    origin.faults[path].extend([origin.fault.status(503)] * 3)

    with pytest.raises(Unreachable, match="gave up after 3 attempts"):
        listed(origin)


def test_no_such_repository_is_told_by_name(origin: Any) -> None:
    with pytest.raises(SourceNotFound, match=r"deepseek-ai/tiny.*404"):
        listed(origin)


def test_a_repository_without_weights_is_told_by_name(origin: Any) -> None:
    origin.put_repository("deepseek-ai/tiny", {"README.md": b"soon"})

    with pytest.raises(SourceNotFound, match=r"hf://deepseek-ai/tiny@main: .*README\.md"):
        listed(origin)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"sha": 1, "siblings": []}'])
def test_a_server_that_is_no_hub_is_named(origin: Any, body: bytes) -> None:
    origin.put("/api/models/deepseek-ai/tiny/revision/main?blobs=true", body)

    with pytest.raises(SourceError, match="does not answer as a model hub does"):
        listed(origin)


@pytest.mark.parametrize("index", [b"<html>", b"[]", b"{}", b'{"weight_map": []}'])
def test_an_index_that_is_none_is_named(origin: Any, index: bytes) -> None:
    origin.put_repository("deepseek-ai/tiny", {"m.safetensors": b"1", INDEX: index})

    with pytest.raises(SourceError, match=r"deepseek-ai/tiny@main.* is malformed"):
        listed(origin)
