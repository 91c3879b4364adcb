"""Copies a checkpoint into a decoder, after comparing the two completely.

No weight is touched before every expected tensor is known to be there in its right shape, and
nothing in the files is left over: a loader that skips what it does not know serves rubbish.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.layers.parameters import Layer, Slot
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.weights.checkpoint import Checkpoint
from deepseek_worker.weights.transfer import Transfer

# Buffers that old checkpoints carry and every loader recomputes.
ROTARY = re.compile(r".*\.rotary_emb\.inv_freq")
# Scales of the KV cache belong to no layer; `memory/kv_formats.py` reads them.
KV_SCALE = re.compile(r"model\.layers\.\d+\.self_attn\.(?:(?:k_proj\.)?k|(?:v_proj\.)?v)_scale")
MAX_NAMED = 5
PLAIN_TYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

ReportProgress = Callable[[float], None]
ReadTensor = Callable[[str], Tensor]


def load(decoder: Decoder, checkpoint: Checkpoint, report: ReportProgress) -> None:
    """Fill and pack every layer; `report` is told the fraction that is done.

    Raises:
        BrokenCheckpoint: tensors are missing, left over, of a wrong shape or cut short.
    """
    compare(decoder, checkpoint)
    layers = list(decoder.layers())
    with reading(checkpoint, layers, decoder.device) as read:
        for index, layer in enumerate(layers):
            fill(layer, checkpoint, read)
            report((index + 1) / len(layers))


@contextmanager
def reading(
    checkpoint: Checkpoint, layers: Iterable[Layer], device: torch.device
) -> Iterator[ReadTensor]:
    """How to read a checkpoint's tensors in the order of the layers' slots.

    A GPU gets those that need no decoding as fast as the disk and the link are; what is decoded,
    and all of it on a CPU, is read when it is asked for.
    """
    if device.type == "cpu":
        yield checkpoint.tensor
        return
    names = [slot.name for layer in layers for slot in layer.slots()]
    extents = {name: checkpoint.extent(name) for name in names if name in checkpoint.shapes}
    found = {name: extent for name, extent in extents.items() if extent is not None}
    with closing(Transfer(found, device)) as transfer:
        yield lambda name: transfer.tensor(name) if name in found else checkpoint.tensor(name)


def fill(layer: Layer, checkpoint: Checkpoint, read: ReadTensor) -> None:
    """Fill and pack one layer.

    Raises:
        BrokenCheckpoint: a tensor is of a wrong type or cut short.
    """
    for slot in layer.slots():
        if slot.name in checkpoint.shapes:
            slot.store(_typed(slot, read(slot.name)))
    layer.pack()


def fill_with_random(decoder: Decoder, seed: int) -> None:
    """Give every layer weights of a plausible size, to measure speed without a checkpoint."""
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    for layer in decoder.layers():
        layer.randomize(generator)
        layer.pack()


def compare(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """See that the checkpoint has every tensor of the decoder, in its shape, and no other.

    Raises:
        BrokenCheckpoint: it has not.
    """
    slots = {slot.name: slot for layer in decoder.layers() for slot in layer.slots()}
    present = checkpoint.shapes
    missing = [name for name, slot in slots.items() if slot.is_required and name not in present]
    if missing:
        raise BrokenCheckpoint(f"the checkpoint lacks {_some(missing)}; download the model again")
    unused = [name for name in present if name not in slots and not _is_ignored(name, decoder)]
    if unused:
        raise BrokenCheckpoint(
            f"the checkpoint has {_some(unused)}, which the architecture "
            f"{decoder.config.architecture!r} of its config does not use"
        )
    for name, slot in slots.items():
        if name in present and tuple(present[name]) not in (slot.shape, *slot.other_shapes):
            raise BrokenCheckpoint(
                f"tensor {name} has shape {list(present[name])}; its config asks for "
                f"{list(slot.shape)}"
            )


def _typed(slot: Slot, tensor: Tensor) -> Tensor:
    wanted = slot.dtypes or PLAIN_TYPES
    if tensor.dtype not in wanted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
        raise BrokenCheckpoint(
            f"tensor {slot.name} is stored as {str(tensor.dtype).removeprefix('torch.')}; its "
            f"config asks for {names}"
        )
    return tensor


def _is_ignored(name: str, decoder: Decoder) -> bool:
    # Fine-tunes of tied models often store the head again.
    is_tied_head = name == "lm_head.weight" and decoder.config.tie_word_embeddings
    return is_tied_head or any(known.fullmatch(name) for known in (ROTARY, KV_SCALE))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"tensor {shown}" + (f" and {more} more" if more > 0 else "")
