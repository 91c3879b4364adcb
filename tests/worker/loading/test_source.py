import json

import pytest

from deepseek_contract.source import HttpsSource
from deepseek_worker.errors import InvalidFlags, SourceNotFound
from deepseek_worker.loading.source import (
    INDEX,
    RemoteFile,
    downloaded_source,
    file_of_address,
    files_of_repository,
    identity,
    redacted,
)

DIGEST = "a" * 64


def listed(*names: str) -> list[dict[str, object]]:
    return [{"rfilename": name, "size": 7, "blobId": "b" * 40} for name in names]


def chosen(*names: str, index: dict[str, str] | None = None) -> list[str]:
    body = None if index is None else json.dumps({"weight_map": index}).encode()
    files = files_of_repository(listed(*names), body, lambda name: f"http://hub/{name}")
    return [file.name for file in files]


def test_a_hub_source_without_a_revision_means_the_main_branch() -> None:
    source = downloaded_source("hf://deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")

    assert identity(source) == "hf://deepseek-ai/DeepSeek-R1-Distill-Qwen-7B@main"


def test_a_hub_source_keeps_its_revision() -> None:
    assert identity(downloaded_source("hf://a/b@refs/pr/3")) == "hf://a/b@refs/pr/3"


def test_an_address_is_known_by_its_checksum_alone() -> None:
    source = downloaded_source(f"https://models.example/a/b.gguf?sig=x#sha256={DIGEST}")
    assert isinstance(source, HttpsSource)

    assert identity(source) == f"sha256:{DIGEST}"
    assert file_of_address(source) == RemoteFile(
        "b.gguf", "https://models.example/a/b.gguf?sig=x", digest=DIGEST
    )


@pytest.mark.parametrize("path", ["a/", "download?id=7", ".gguf", "..gguf", "a%2F..%2Fb.gguf"])
def test_an_address_without_a_usable_name_is_stored_under_a_plain_one(path: str) -> None:
    source = HttpsSource(f"https://models.example/{path}", DIGEST)

    assert file_of_address(source).name == "model.gguf"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hf://alone",
        "hf://a/../b",
        "http://models.example/a.gguf",
        "/models/a.gguf",
        "package://smollm2",
        "pvc://claim",
        "https://models.example/a.gguf",
        "https://models.example/a.gguf?key=secret#sha256=abc",
        f"https://me:secret@models.example/a.gguf#sha256={DIGEST}",
    ],
)
def test_what_a_loader_cannot_download_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(InvalidFlags) as refused:
        downloaded_source(text)

    assert "use hf://ORGANISATION/NAME[@REVISION] or https://" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_what_goes_into_logs_holds_neither_credentials_nor_signatures() -> None:
    shown = redacted("https://me:pw@models.example:8443/a.gguf?sig=abc#sha256=1")

    assert shown == "https://models.example:8443/a.gguf"


def test_single_safetensors_come_with_what_tokenizing_needs_and_nothing_else() -> None:
    names = chosen(
        "model.safetensors", "consolidated.safetensors", "adapter_model.safetensors",
        "pytorch_model.bin", "config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "README.md", "onnx/model.onnx", ".gitattributes", "model-q4_1.gguf",
    )  # fmt: skip

    assert names == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip


def test_the_index_decides_which_shards_are_needed() -> None:
    shard = "model-0000{}-of-00002.safetensors".format

    names = chosen(
        shard(1), shard(2), "model-old.safetensors", INDEX, index={"a": shard(1), "b": shard(2)}
    )

    assert names == [shard(1), shard(2), INDEX]


def test_a_shard_that_the_index_names_and_nobody_has_is_told_before_the_download() -> None:
    with pytest.raises(SourceNotFound, match=r"model-00002-of-00002\.safetensors"):
        chosen("a.safetensors", INDEX, index={"x": "model-00002-of-00002.safetensors"})


def test_of_many_quantizations_one_that_the_engine_reads_is_taken() -> None:
    assert chosen("m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q4_1.gguf", "m-Q8_0.gguf") == ["m-Q8_0.gguf"]
    assert chosen("m.q4_1.gguf", "m.f32.gguf", "config.json") == ["config.json", "m.f32.gguf"]
    assert chosen("model.gguf") == ["model.gguf"]


def test_a_gguf_in_parts_is_taken_whole_or_not_at_all() -> None:
    part = "m-F16-0000{}-of-00002.gguf".format

    assert chosen(part(1), part(2)) == [part(1), part(2)]
    with pytest.raises(SourceNotFound, match="00002-of-00002"):
        chosen(part(1))


@pytest.mark.parametrize(
    "names",
    [(), ("config.json", "pytorch_model.bin"), ("m-Q4_K_M.gguf",), ("a.gguf", "b.gguf")],
    ids=["empty", "other format", "unread quantization", "no telling which"],
)
def test_a_repository_without_readable_weights_says_what_it_has(names: tuple[str, ...]) -> None:
    with pytest.raises(SourceNotFound) as refused:
        chosen(*names)

    assert all(name in str(refused.value) for name in names)


def test_names_that_lead_out_of_the_folder_are_never_taken() -> None:
    with pytest.raises(SourceNotFound):
        chosen("../model.safetensors", "/etc/model.safetensors", "..safetensors")


def test_large_files_are_known_by_sha256_and_small_ones_by_their_git_name() -> None:
    files = files_of_repository(
        [
            {
                "rfilename": "model.safetensors",
                "blobId": "b" * 40,
                "size": 9,
                "lfs": {"sha256": DIGEST, "size": 9, "pointerSize": 130},
            },
            {"rfilename": "config.json", "blobId": "c" * 40, "size": 3},
            {"rfilename": "tokenizer.json"},
        ],
        None,
        lambda name: f"http://hub/{name}",
    )

    known = [(file.name, file.size_bytes, file.digest, file.digest_kind) for file in files]
    assert known == [
        ("config.json", 3, "c" * 40, "git-sha1"),
        ("model.safetensors", 9, DIGEST, "sha256"),
        ("tokenizer.json", None, None, "git-sha1"),
    ]
