"""Copies a checkpoint into a decoder, after comparing the two completely.

No weight is touched before every expected tensor is known to be there in its right shape, and
nothing in the files is left over: a loader that skips what it does not know serves rubbish.
"""

import re
from collections.abc import Callable

import torch

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.layers.norm import RmsNorm
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.weights.checkpoint import Checkpoint

# Buffers that old checkpoints carry and every loader recomputes.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
MAX_NAMED = 5

ReportProgress = Callable[[float], None]


def load(decoder: Decoder, checkpoint: Checkpoint, report: ReportProgress) -> None:
    """Fill and pack every layer; `report` is told the fraction that is done.

    Raises:
        BrokenCheckpoint: tensors are missing, left over, of a wrong shape or cut short.
    """
    _compare(decoder, checkpoint)
    layers = list(decoder.layers())
    for index, layer in enumerate(layers):
        for slot in layer.slots():
            slot.target.copy_(checkpoint.tensor(slot.name))
        layer.pack()
        report((index + 1) / len(layers))


def fill_with_random(decoder: Decoder, seed: int) -> None:
    """Give every layer weights of a plausible size, to measure speed without a checkpoint."""
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    for layer in decoder.layers():
        for slot in layer.slots():
            if isinstance(layer, RmsNorm):
                slot.target.fill_(1.0)
            else:
                slot.target.normal_(0.0, 0.02, generator=generator)
        layer.pack()


def _compare(decoder: Decoder, checkpoint: Checkpoint) -> None:
    expected = {
        slot.name: tuple(slot.target.shape) for layer in decoder.layers() for slot in layer.slots()
    }
    present = checkpoint.shapes
    missing = [name for name in expected if name not in present]
    if missing:
        raise BrokenCheckpoint(f"the checkpoint lacks {_some(missing)}; download the model again")
    unused = [name for name in present if name not in expected and not _is_ignored(name, decoder)]
    if unused:
        raise BrokenCheckpoint(
            f"the checkpoint has {_some(unused)}, which the architecture "
            f"{decoder.config.architecture!r} of its config does not use"
        )
    for name, shape in expected.items():
        if tuple(present[name]) != shape:
            raise BrokenCheckpoint(
                f"tensor {name} has shape {list(present[name])}; its config asks for {list(shape)}"
            )


def _is_ignored(name: str, decoder: Decoder) -> bool:
    # Fine-tunes of tied models often store the head again.
    is_tied_head = name == "lm_head.weight" and decoder.config.tie_word_embeddings
    return is_tied_head or IGNORED.fullmatch(name) is not None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"tensor {shown}" + (f" and {more} more" if more > 0 else "")
