"""Which precision the KV cache has in each layer.

Keys of some models have a few channels so large that 8 bits leave nothing for the others: the
layers 0 and 27 of Qwen2.5-Math-7B, from which R1-Distill-Qwen-7B comes, have key biases of norm
605 and 921 beside a median of 22, and with 8-bit keys the model answers "????". The biases tell
before a weight is loaded. Sources: verl#4435, llama.cpp#21385.
"""

from collections.abc import Sequence
from statistics import median

from deepseek_contract.sizing import KvFormat
from deepseek_worker.config import KvCacheFormat
from deepseek_worker.memory.pool import KvLayer
from deepseek_worker.weights.checkpoint import Checkpoint

# Times the median of the model's layers.
OUTLIER_RATIO = 4.0
# A channel this large takes most of the range of e4m3 by itself.
OUTLIER_VALUE = 100.0
# What `auto` takes where there are no outliers: each head of each token has a scale of its own,
# so that nothing has to be calibrated.
ROUNDED: KvFormat = "int8"


def key_biases(checkpoint: Checkpoint, num_layers: int) -> list[tuple[float, float]]:
    """Norm and largest magnitude of each layer's key bias; empty where there are none."""
    names = [f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(num_layers)]
    if not all(name in checkpoint.shapes for name in names):
        return []
    biases = [checkpoint.tensor(name).float() for name in names]
    return [(float(bias.norm()), float(bias.abs().max())) for bias in biases]


def outlier_layers(biases: Sequence[tuple[float, float]]) -> list[int]:
    """Layers whose keys 8 bits cannot hold; `biases` as `key_biases` returns them."""
    if not biases:
        return []
    usual = median(norm for norm, _ in biases)
    return [
        layer
        for layer, (norm, largest) in enumerate(biases)
        if norm > OUTLIER_RATIO * usual or largest > OUTLIER_VALUE
    ]


def kv_formats(
    asked: KvCacheFormat, plain: KvFormat, num_layers: int, outliers: Sequence[int] | None
) -> tuple[KvFormat, ...]:
    """The precision of each layer.

    Args:
        asked: The flag.
        plain: That of the activations.
        num_layers: Of the model.
        outliers: Of `outlier_layers`, for a model that `auto` may round; None for one that it
            keeps plain.
    """
    if asked != "auto":
        return (asked,) * num_layers
    if outliers is None:
        return (plain,) * num_layers
    return tuple(plain if layer in outliers else ROUNDED for layer in range(num_layers))


def take_stored_scales(layers: Sequence[KvLayer], checkpoint: Checkpoint) -> None:
    """Give fp8 pages the scales that were calibrated for the checkpoint, where it has any."""
    for index, layer in enumerate(layers):
        if layer.key_scale is None or layer.key_scale.dim() > 1 or layer.value_scale is None:
            continue
        prefix = f"model.layers.{index}.self_attn"
        # compressed-tensors, and older files that name the projection.
        for kind, scale in (("k", layer.key_scale), ("v", layer.value_scale)):
            for name in (f"{prefix}.{kind}_scale", f"{prefix}.{kind}_proj.{kind}_scale"):
                if name in checkpoint.shapes:
                    scale.copy_(checkpoint.tensor(name).float().reshape(-1))
