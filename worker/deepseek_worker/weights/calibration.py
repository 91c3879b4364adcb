"""Loads a checkpoint whose weights are rounded for the inputs that a text gives them.

The text runs through the model while it is loaded: a projection is read when its inputs are
there, rounded for them, and multiplied with, so that those after it see what rounding did. Files
are read once, and one unrounded projection is in memory at a time, as without a text.

`calibration.txt` is prose in the public domain (the beginnings of Mark Twain's The Adventures of
Tom Sawyer, 1876, without some paragraphs, and of Jane Austen's Pride and Prejudice, 1813), and a
page of this project's documentation and one of its code.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepseek_contract.sizing import KvFormat
from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.layers.attention import Span, TorchAttention
from deepseek_worker.layers.linear import GatedProduct, Linear, TakesCodes
from deepseek_worker.layers.norm import RmsNorm
from deepseek_worker.layers.parameters import Layer, Slot
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.quantization.linears import QuantizedLinear
from deepseek_worker.quantization.rounding import Inputs
from deepseek_worker.weights.checkpoint import Checkpoint
from deepseek_worker.weights.loading import ReportProgress, compare, fill

TEXT = Path(__file__).with_name("calibration.txt")
SEQUENCE_TOKENS = 1024
PAGE_TOKENS = 16


def load_calibrated(
    decoder: Decoder,
    checkpoint: Checkpoint,
    token_ids: Sequence[int],
    kv_format: KvFormat,
    report: ReportProgress,
) -> None:
    """Fill and pack every layer; `report` is told the fraction that is done.

    Args:
        decoder: Without weights.
        checkpoint: Not quantized.
        token_ids: The text.
        kv_format: Of the decoder's own precision.
        report: See above.

    Raises:
        BrokenCheckpoint: tensors are missing, left over, of a wrong shape or cut short; or the
            text does not come through the model in finite numbers.
    """
    compare(decoder, checkpoint)
    layers = list(decoder.layers())
    filled: list[Layer] = []

    def fill_next(layer: Layer) -> None:
        fill(layer, checkpoint, checkpoint.tensor)
        filled.append(layer)
        report(len(filled) / len(layers))

    for layer in layers:
        if not isinstance(layer, QuantizedLinear):
            fill_next(layer)
    for block in decoder.blocks:
        block.qkv = _stand_in(block.qkv, fill_next, block.input_norm)
        block.output = _stand_in(block.output, fill_next)
        block.gate_up = _stand_in(block.gate_up, fill_next, block.mlp_norm)
        block.down = _stand_in(block.down, fill_next)
    _read(decoder, token_ids, kv_format)
    for block in decoder.blocks:
        block.qkv, block.output = _behind(block.qkv), _behind(block.output)
        block.gate_up, block.down = _behind(block.gate_up), _behind(block.down)


class _StandIn:
    """A projection that is filled when its first input is here."""

    def __init__(
        self, linear: QuantizedLinear, fill_next: Callable[[Layer], None], norm: RmsNorm | None
    ) -> None:
        self.linear = linear
        self._fill_next = fill_next
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        """Fill the projection for `x`, and project it; `x` may be changed.

        Raises:
            BrokenCheckpoint: `x` is not finite.
        """
        if not x.isfinite().all():
            name = next(self.linear.slots()).name
            raise BrokenCheckpoint(
                f"the calibration text's inputs to {name} are not finite; the weights before it "
                "are broken, or too large for this dtype"
            )
        gain = None if self._norm is None else self._norm.weight
        self.linear.round_for(Inputs(x, gain))
        self._fill_next(self.linear)
        return self.linear(x)

    def taking_codes(self, num_tokens: int) -> TakesCodes | None:  # noqa: ARG002 - as others
        """Nothing: the projection has to see its input."""
        return None

    def gated_product(self) -> GatedProduct | None:
        """None: calling the projection is what fills it."""
        return None

    def slots(self) -> Iterator[Slot]:
        """Those of the projection."""
        return self.linear.slots()

    def pack(self) -> None:
        """Pack the projection."""
        self.linear.pack()

    def randomize(self, generator: torch.Generator) -> None:
        """Randomize the projection."""
        self.linear.randomize(generator)

    def parameters(self) -> Iterator[Tensor]:
        """Those of the projection."""
        return self.linear.parameters()


def _stand_in(
    linear: Linear, fill_next: Callable[[Layer], None], norm: RmsNorm | None = None
) -> Linear:
    return _StandIn(linear, fill_next, norm) if isinstance(linear, QuantizedLinear) else linear


def _behind(linear: Linear) -> Linear:
    return linear.linear if isinstance(linear, _StandIn) else linear


@torch.inference_mode()
def _read(decoder: Decoder, token_ids: Sequence[int], kv_format: KvFormat) -> None:
    """Run the text through the decoder, as prompts of a usual length."""
    length = min(SEQUENCE_TOKENS, decoder.config.max_context_tokens)
    pages_each = -(-length // PAGE_TOKENS)
    sizes = [min(length, len(token_ids) - first) for first in range(0, len(token_ids), length)]
    pool = KvPool(
        decoder.config,
        num_pages=pages_each * len(sizes),
        page_tokens=PAGE_TOKENS,
        formats=(kv_format,) * decoder.config.num_layers,
        device=decoder.device,
    )
    spans = [
        Span(range(index * pages_each, (index + 1) * pages_each), 0, size)
        for index, size in enumerate(sizes)
    ]
    attention = TorchAttention(pool, decoder.config.num_heads, decoder.dtype, decoder.rope)
    decoder.forward(
        torch.tensor(token_ids, device=decoder.device), attention, attention.plan(spans)
    )
