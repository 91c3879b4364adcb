"""What is between the file and a projection's layout, and projections of unequal parts."""

import torch

from deepseek_worker.layers.linear import PlainLinear, Projection
from deepseek_worker.quantization.codes import RowCodes
from deepseek_worker.quantization.linears import DequantizedLinear, JoinedLinear, Stored, joined
from deepseek_worker.quantization.readers import Piece

CPU = torch.device("cpu")


class TwoPieces:
    """Codes and a scale, of which the scale may be absent."""

    def pieces(self, rows, columns):
        yield Piece("codes", (rows, columns), dtypes=(torch.int8,))
        yield Piece("scale", (rows,), is_required=False)

    def read(self, pieces, rows, columns):
        return RowCodes(pieces["codes"], pieces.get("scale", torch.ones(rows)))


def test_the_reader_names_the_tensors_of_every_part():
    slots = list(
        Stored(Projection({"q": 4, "k": 2}, 3, True), TwoPieces(), CPU).slots(torch.empty(6))
    )

    assert [(slot.name, slot.shape, slot.is_required) for slot in slots] == [
        ("q.codes", (4, 3), True),
        ("q.scale", (4,), False),
        ("q.bias", (4,), True),
        ("k.codes", (2, 3), True),
        ("k.scale", (2,), False),
        ("k.bias", (2,), True),
    ]


def test_what_was_read_is_handed_over_once():
    stored = Stored(Projection({"q": 4}, 3, False), TwoPieces(), CPU)
    codes = torch.ones(4, 3, dtype=torch.int8)
    next(stored.slots(None)).store(codes)

    (part,) = stored.take()

    assert torch.equal(part.codes, codes)
    assert stored.take() == []


@torch.inference_mode()
def test_a_quantized_checkpoint_can_be_kept_plain():
    layer = DequantizedLinear(
        Projection({"q": 4, "k": 2}, 3, True), TwoPieces(), torch.float32, CPU
    )
    codes = torch.arange(18, dtype=torch.int8).view(6, 3)
    for slot in layer.slots():
        rows = slice(0, 4) if slot.name.startswith("q") else slice(4, 6)
        kind = slot.name[2:]
        value = {"codes": codes[rows], "scale": torch.full((len(codes[rows]),), 0.5)}
        slot.store(value.get(kind, torch.ones(slot.shape)))

    layer.pack()

    assert torch.allclose(layer(torch.eye(3)).T, codes * 0.5 + 1)
    assert sum(tensor.numel() for tensor in layer.parameters()) == 24


@torch.inference_mode()
def test_joined_parts_answer_side_by_side():
    members = [
        PlainLinear(Projection({name: rows}, 5, False), torch.float32, CPU)
        for name, rows in (("a", 3), ("b", 2))
    ]
    both = JoinedLinear(members)
    both.randomize(torch.Generator().manual_seed(0))
    weight = torch.cat([member.weight for member in members])
    x = torch.randn(4, 5)

    both.pack()

    assert torch.allclose(both(x), x @ weight.T, atol=1e-6)
    assert len(list(both.parameters())) == 2


def test_fp8_rows_are_joined():
    parts = [torch.randn(2, 3).to(torch.float8_e4m3fn) for _ in range(2)]

    whole = joined(parts)

    assert torch.equal(whole.float(), torch.cat([part.float() for part in parts]))
