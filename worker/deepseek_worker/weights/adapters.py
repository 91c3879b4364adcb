"""LoRA adapters in a decoder: the memory they take, and where they are added.

Of each projection the adapters' weights are one pair of tensors, as large for each adapter as for
the one of the highest rank there; a projection that no adapter changes has none.
"""

from collections.abc import Sequence

import torch

from deepseek_kernels.lora import workspace_bytes
from deepseek_worker.config import LoraAdapter
from deepseek_worker.layers.linear import Linear, Projection
from deepseek_worker.layers.lora import AdaptedLinear, AdapterRows
from deepseek_worker.memory.ledger import AdapterBytes
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.models.decoder import BlockProjections, Decoder
from deepseek_worker.weights.peft import PeftAdapter


def open_adapters(wanted: Sequence[LoraAdapter], model: ModelConfig) -> tuple[PeftAdapter, ...]:
    """Open and compare every adapter; reads no weight.

    Raises:
        ModelError: one is missing, broken or not served.
    """
    return tuple(PeftAdapter(adapter.name, adapter.path, model) for adapter in wanted)


def adapter_bytes(
    adapters: Sequence[PeftAdapter], model: ModelConfig, itemsize: int, max_batch_tokens: int
) -> AdapterBytes:
    """Bytes of all adapters' weights, and of what one product of them needs at most."""
    weights = workspace = 0
    for index in range(model.num_layers):
        block = BlockProjections.of(model, index)
        for projection in (block.qkv, block.output, block.gate_up, block.down):
            rank, parts = _rank(projection, adapters), len(projection.parts)
            columns = parts * projection.in_features + projection.out_features
            weights += len(adapters) * rank * columns * itemsize
            workspace = max(workspace, workspace_bytes(max_batch_tokens, parts, rank))
    return AdapterBytes(weights, workspace)


def attach(decoder: Decoder, adapters: Sequence[PeftAdapter]) -> None:
    """Read the adapters' weights, and have a loaded decoder add them to rows that ask for one.

    Raises:
        BrokenCheckpoint: a tensor is of a wrong type, or not finite.
    """
    if not adapters:
        return
    rows = decoder.adapter_rows = AdapterRows()
    decoder.num_adapters = len(adapters)

    def adapted(linear: Linear, projection: Projection) -> Linear:
        rank = _rank(projection, adapters)
        if rank == 0:
            return linear
        shape_a = (len(adapters), len(projection.parts), rank, projection.in_features)
        shape_b = (len(adapters), projection.out_features, rank)
        a = torch.zeros(shape_a, dtype=decoder.dtype, device=decoder.device)
        b = torch.zeros(shape_b, dtype=decoder.dtype, device=decoder.device)
        for index, adapter in enumerate(adapters):
            first = 0
            for part, (module, width) in enumerate(projection.parts.items()):
                if module in adapter.targets:
                    own_a, own_b = adapter.weights(module)
                    own_rank = len(own_a)
                    a[index, part, :own_rank].copy_(own_a)
                    b[index, first : first + width, :own_rank].copy_(own_b)
                first += width
        return AdaptedLinear(linear, a, b, tuple(projection.parts.values()), rows)

    for index, block in enumerate(decoder.blocks):
        projections = BlockProjections.of(decoder.config, index)
        block.qkv = adapted(block.qkv, projections.qkv)
        block.output = adapted(block.output, projections.output)
        block.gate_up = adapted(block.gate_up, projections.gate_up)
        block.down = adapted(block.down, projections.down)


def _rank(projection: Projection, adapters: Sequence[PeftAdapter]) -> int:
    """The highest rank that an adapter has for a part of a projection; 0 if none has any."""
    return max(
        (
            adapter.targets[module].rank
            for adapter in adapters
            for module in projection.parts
            if module in adapter.targets
        ),
        default=0,
    )
