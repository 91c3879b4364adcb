"""One model's shape, read from a config.json or from GGUF metadata; refuses what is not served.

Everything that changes a model's output is either understood here or an error: a rope scaling
that is silently dropped still produces fluent text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepseek_worker.errors import BrokenCheckpoint, UnsupportedModel
from deepseek_worker.quantization.stored import StoredQuantization, stored_quantization

Architecture = Literal["llama", "qwen2"]
RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
}
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base and scaling, in the words of transformers."""

    theta: float = 10000.0
    type: RopeType = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The scaling's own numbers, such as `factor` and `original_max_position_embeddings`."""

    @property
    def max_context_tokens(self) -> int | None:
        """Up to where the scaling is the same for every sequence length; None without a limit.

        `dynamic` and `longrope` change all positions once a sequence passes its original
        length, which keys in a cache cannot follow, so they are served up to there.
        """
        if self.type in ("dynamic", "longrope"):
            return int(self.parameters["original_max_position_embeddings"])
        return None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder has to know about a Llama or Qwen2 model."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    """What the checkpoint was trained in: float32, bfloat16 or float16."""
    eos_token_ids: frozenset[int]
    quantization: StoredQuantization | None = None
    """How the files store the matrices; None where they are not quantized."""

    def __post_init__(self) -> None:
        """Check what the layers rely on."""
        if self.num_heads % self.num_kv_heads:
            raise BrokenCheckpoint(
                f"num_attention_heads={self.num_heads} is no multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim={self.head_dim} is odd; rope needs pairs")

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence that the positions are made for."""
        return min(self.max_position_embeddings, self.rope.max_context_tokens or 2**62)


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the contents of config.json and, when there is one, generation_config.json.

    Raises:
        UnsupportedModel: an architecture or feature that is not served.
        BrokenCheckpoint: a field is missing or makes no sense.
    """
    names = config.get("architectures") or ["none"]
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        raise UnsupportedModel(
            f"architecture {names[0]!r} is not served; served are {', '.join(ARCHITECTURES)}"
        )
    _refuse_features(config)
    heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    if not config.get("head_dim") and hidden_size % heads:
        raise BrokenCheckpoint(
            f"hidden_size={hidden_size} is no multiple of num_attention_heads={heads} and "
            "config.json gives no head_dim"
        )
    is_llama = architecture == "llama"
    bias = bool(config.get("attention_bias", False)) if is_llama else True
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden_size // heads,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        rope=_rope(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        o_bias=bias and is_llama,
        mlp_bias=bool(config.get("mlp_bias", False)) if is_llama else False,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        eos_token_ids=_eos_token_ids(config, generation or {}),
        quantization=stored_quantization(config),
    )


def _refuse_features(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act={config['hidden_act']!r} is not served; only 'silu' is")
    if config.get("use_sliding_window"):
        raise UnsupportedModel("use_sliding_window=true is not served; attention is always full")
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(layer_types)} are not all 'full_attention'")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_scaling` with `rope_theta`."""
    parameters = dict(config.get("rope_parameters") or {})
    parameters.update(config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    old_name = parameters.pop("type", None)
    rope_type = parameters.pop("rope_type", None) or old_name or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rope_type {rope_type!r} is not served; served are {', '.join(ROPE_TYPES)}"
        )
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor={partial} is not served; only 1.0 is")
    parameters.setdefault(
        "original_max_position_embeddings",
        config.get("original_max_position_embeddings") or config["max_position_embeddings"],
    )
    if rope_type == "dynamic":
        # Its own original length is the whole length: transformers looks at nothing else.
        parameters["original_max_position_embeddings"] = config["max_position_embeddings"]
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }
    missing = [name for name in needed.get(rope_type, ()) if name not in parameters]
    if missing:
        raise BrokenCheckpoint(f"rope_type {rope_type!r} lacks {', '.join(missing)}")
    if rope_type in ("yarn", "longrope") and parameters.get("factor") is None:
        parameters["factor"] = (
            config["max_position_embeddings"] / parameters["original_max_position_embeddings"]
        )
    return RopeConfig(float(theta), rope_type, parameters)


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise BrokenCheckpoint(f"config.json: {name} is {value!r}; it has to be a positive integer")
    return value
