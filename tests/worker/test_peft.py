"""Adapters as PEFT saves them: what is read, and what is refused by name before any weight."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_worker.errors import BrokenCheckpoint, ModelNotFound, UnsupportedModel
from deepseek_worker.weights.checkpoint import open_checkpoint
from deepseek_worker.weights.peft import PeftAdapter

LAYER = "model.layers.1"
Q, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tiny):
    return open_checkpoint(tiny[0]).config


@pytest.fixture
def open_adapter(tiny, make_adapter, model):
    """Open a fresh adapter after changing its configuration and its tensors."""

    def open_(change=None, *, edit=lambda _: None, path=lambda folder: folder, **options):
        folder = make_adapter(tiny[1], config=change, **options)
        tensors = load_file(folder / "adapter_model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")
        return PeftAdapter("terse", path(folder), model)

    return open_


def test_every_target_has_its_tensors_and_scale(open_adapter):
    adapter = open_adapter(rank=4, alpha=8)

    assert len(adapter.targets) == 2 * 7
    assert (adapter.targets[Q].rank, adapter.targets[Q].scale) == (4, 2.0)
    a, b = adapter.weights(DOWN)
    assert (a.shape, b.shape) == ((4, 96), (64, 4))


def test_the_file_itself_may_be_named(open_adapter):
    adapter = open_adapter(path=lambda folder: folder / "adapter_model.safetensors")

    assert len(adapter.targets) == 14


def test_rank_stabilized_adapters_are_scaled_by_the_root(open_adapter):
    adapter = open_adapter({"use_rslora": True}, rank=4, alpha=8)

    assert adapter.targets[Q].scale == 4.0


def test_patterns_change_rank_and_alpha_of_some_targets(open_adapter):
    patterns = {"alpha_pattern": {"layers.1.mlp.down_proj": 5, "nothing": 1}}
    adapter = open_adapter(patterns, rank=4, alpha=8, ranks={"q_proj": 16})

    assert (adapter.targets[Q].rank, adapter.targets[Q].scale) == (16, 0.5)
    assert (adapter.targets[DOWN].rank, adapter.targets[DOWN].scale) == (4, 1.25)
    assert adapter.targets["model.layers.0.mlp.down_proj"].scale == 2.0


@pytest.mark.parametrize(
    ("change", "kept", "modules"),
    [
        ({"target_modules": "all-linear"}, "", 14),
        ({"target_modules": r".*\.self_attn\.(q|v)_proj"}, r"(q|v)_proj", 4),
        ({"target_modules": ["self_attn.o_proj", DOWN]}, rf"o_proj|{DOWN}", 3),
        ({"layers_to_transform": [1]}, "layers.1", 7),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, "layers.0", 7),
        ({"exclude_modules": ["gate_proj", "up_proj"]}, "_attn|down", 10),
        ({"exclude_modules": r".*layers\.0.*"}, "layers.1", 7),
    ],
    ids=lambda value: str(value)[:40],
)
def test_targets_are_chosen_as_peft_does(open_adapter, change, kept, modules):

    def edit(tensors):
        for name in [name for name in tensors if not re.search(kept, name)]:
            del tensors[name]

    adapter = open_adapter(change, edit=edit)

    assert len(adapter.targets) == modules


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"peft_type": "IA3"}, UnsupportedModel, "peft_type .* is \"IA3\"; .* only as 'LORA'"),
        ({"bias": "all"}, UnsupportedModel, 'bias in adapter_config.json is "all"'),
        (
            {"modules_to_save": ["lm_head"]},
            UnsupportedModel,
            r'modules_to_save .* is \["lm_head"\]',
        ),
        ({"use_dora": True}, UnsupportedModel, "use_dora .* is true"),
        ({"lora_bias": True}, UnsupportedModel, "lora_bias .* is true"),
        ({"fan_in_fan_out": True}, UnsupportedModel, "fan_in_fan_out"),
        ({"alora_invocation_tokens": [5]}, UnsupportedModel, "alora_invocation_tokens"),
        ({"trainable_token_indices": [5]}, UnsupportedModel, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, UnsupportedModel, "layer_replication"),
        ({"of_next_year": {"x": 1}}, UnsupportedModel, 'of_next_year .* is {"x": 1}'),
        ({"init_lora_weights": "pissa"}, UnsupportedModel, 'init_lora_weights .* is "pissa"'),
        ({"target_modules": ["q_proj", "lm_head"]}, UnsupportedModel, 'is "lm_head"'),
        ({"target_modules": ["embed_tokens"]}, UnsupportedModel, "q_proj, k_proj, v_proj"),
        ({"target_modules": "nothing"}, UnsupportedModel, "target_modules"),
        ({"target_modules": None}, BrokenCheckpoint, "target_modules .* is null"),
        ({"target_modules": "("}, BrokenCheckpoint, "a regular expression"),
        ({"layers_to_transform": [1], "layers_pattern": "h"}, UnsupportedModel, "layers_pattern"),
        ({"layers_to_transform": ["1"]}, BrokenCheckpoint, "layers_to_transform"),
        ({"r": 0}, BrokenCheckpoint, "r .* is 0; it has to be a whole number above 0"),
        ({"r": 2.5}, BrokenCheckpoint, "r .* is 2.5"),
        ({"r": 512}, UnsupportedModel, "the rank of .* is 512; at most 256 is served"),
        ({"lora_alpha": None}, BrokenCheckpoint, "lora_alpha .* is null"),
        ({"lora_alpha": float("nan")}, BrokenCheckpoint, "lora_alpha"),
        ({"use_rslora": "yes"}, BrokenCheckpoint, "use_rslora"),
        ({"rank_pattern": {"q_proj": "8"}}, BrokenCheckpoint, "rank_pattern.q_proj"),
        ({"rank_pattern": [1]}, BrokenCheckpoint, "rank_pattern"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_fields_that_are_not_served_or_wrong_are_named(open_adapter, change, error, message):
    with pytest.raises(error, match=f"adapter 'terse': .*{message}"):
        open_adapter(change)


def without(name):
    return lambda tensors: tensors.pop(f"base_model.model.{name}")


def with_(name, tensor):
    return lambda tensors: tensors.update({f"base_model.model.{name}": tensor})


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (without(f"{Q}.lora_B.weight"), BrokenCheckpoint, rf"lacks .*{Q}.lora_B.weight"),
        (
            with_(f"{Q}.lora_A.weight", torch.ones(4, 63)),
            BrokenCheckpoint,
            r"\[4, 63\].* \[4, 64\]",
        ),
        (
            with_(f"{Q}.lora_A.weight", torch.ones(8, 64)),
            BrokenCheckpoint,
            r"\[8, 64\].* \[4, 64\]",
        ),
        (with_(f"{DOWN}.lora_B.weight", torch.ones(65, 4)), BrokenCheckpoint, "another model"),
        (
            with_("model.embed_tokens.lora_embedding_A", torch.ones(4, 128)),
            UnsupportedModel,
            "has the tensor base_model.model.model.embed_tokens.lora_embedding_A",
        ),
        (
            with_(f"{Q}.lora_magnitude_vector", torch.ones(64)),
            UnsupportedModel,
            "lora_magnitude_vector",
        ),
    ],
    ids=["missing", "wrong base", "wrong rank", "wrong rows", "embedding", "dora"],
)
def test_tensors_that_are_missing_wrong_or_left_over_are_named(open_adapter, edit, error, message):
    with pytest.raises(error, match=f"adapter 'terse': .*{message}"):
        open_adapter(edit=edit)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(4, 64, dtype=torch.int32), "is stored as int32"),
        (torch.full((4, 64), float("nan")), "not finite"),
    ],
    ids=["integers", "nan"],
)
def test_numbers_that_are_none_are_refused(open_adapter, tensor, message):
    adapter = open_adapter(edit=with_(f"{Q}.lora_A.weight", tensor))

    with pytest.raises(BrokenCheckpoint, match=f"{Q}.lora_A.weight .*{message}"):
        adapter.weights(Q)


def test_an_adapter_of_a_larger_model_is_refused(make_checkpoint, make_adapter, model):
    _, larger = make_checkpoint(hidden_size=80)

    with pytest.raises(BrokenCheckpoint, match="was it made for another model"):
        PeftAdapter("terse", make_adapter(larger), model)


@pytest.mark.parametrize("size", [5, 1000])
def test_a_truncated_file_is_refused(tiny, make_adapter, model, size):
    folder = make_adapter(tiny[1])
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-size] if size == 1000 else file.read_bytes()[:size])

    with pytest.raises(BrokenCheckpoint, match=r"adapter 'terse': .* is cut short"):
        PeftAdapter("terse", folder, model)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("adapter_config.json", "holds no adapter_config.json"),
        ("adapter_model.safetensors", "holds no adapter_model.safetensors"),
    ],
)
def test_a_missing_file_is_named(tiny, make_adapter, model, missing, message):
    folder = make_adapter(tiny[1])
    (folder / missing).unlink()

    with pytest.raises(ModelNotFound, match=f"adapter 'terse': {folder} {message}"):
        PeftAdapter("terse", folder, model)


def test_a_folder_that_is_not_there_is_named(tmp_path, model):
    with pytest.raises(ModelNotFound, match=f"{tmp_path}/nowhere does not exist"):
        PeftAdapter("terse", tmp_path / "nowhere", model)


def test_pickled_weights_are_refused(tiny, make_adapter, model):
    folder = make_adapter(tiny[1])
    (folder / "adapter_model.bin").touch()

    with pytest.raises(UnsupportedModel, match=r"is no \.safetensors file"):
        PeftAdapter("terse", folder / "adapter_model.bin", model)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"], ids=["cut", "list", "bytes"])
def test_a_configuration_that_is_no_json_object_is_refused(tiny, make_adapter, model, text):
    folder = make_adapter(tiny[1])
    (folder / "adapter_config.json").write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(BrokenCheckpoint, match=r"adapter_config.json .* JSON"):
        PeftAdapter("terse", folder, model)


WRONG = (True, -1, "x", {}, [[1]], {"(": 1}, float("inf"))


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules", "layers_to_transform"])
def test_values_of_another_kind_are_named_by_their_field(open_adapter, field, value):
    with pytest.raises((BrokenCheckpoint, UnsupportedModel), match=f"adapter 'terse': .*{field}"):
        open_adapter({field: value})


@pytest.mark.parametrize("value", [True, -1, "x", [[1]], {"(": 1}, {"q_proj": None}], ids=str)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_of_another_kind_are_named_by_their_field(open_adapter, field, value):
    with pytest.raises(BrokenCheckpoint, match=f"adapter 'terse': .*{field}"):
        open_adapter({field: value})
