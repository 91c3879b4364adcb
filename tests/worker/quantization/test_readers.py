"""Storage formats of a matrix, against matrices written bit by bit."""

import numpy as np
import pytest
import torch

from deepseek_worker.errors import BrokenCheckpoint, UnsupportedModel
from deepseek_worker.layers.linear import Projection
from deepseek_worker.quantization.build import as_stored, build_linear
from deepseek_worker.quantization.codes import BlockCodes, GroupCodes, RowCodes, dequantize
from deepseek_worker.quantization.readers import Piece, PlainReader, reader_of
from deepseek_worker.quantization.schemes import PLAIN, Scheme
from deepseek_worker.quantization.stored import StoredQuantization

CPU = torch.device("cpu")
ROWS, COLUMNS = 40, 320


def matrix(rows=ROWS, columns=COLUMNS):
    return np.random.default_rng(1).normal(size=(rows, columns))


def decode(stored, tensors, rows=ROWS, columns=COLUMNS, kept=None):
    reader = reader_of(stored, stored.native.weights if kept is None else kept)
    pieces = {piece.suffix: piece for piece in reader.pieces(rows, columns)}
    for name, tensor in tensors.items():
        piece = pieces[name]
        assert tuple(tensor.shape) in (piece.shape, *piece.other_shapes), name
        assert piece.dtypes is None or tensor.dtype in piece.dtypes, name
    assert {name for name, piece in pieces.items() if piece.is_required} <= tensors.keys()
    return reader.read(tensors, rows, columns)


def test_an_unquantized_matrix_is_one_tensor():
    weight = torch.randn(3, 4)

    assert list(PlainReader().pieces(3, 4)) == [Piece("weight", (3, 4))]
    assert PlainReader().read({"weight": weight}, 3, 4) is weight


@pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 128, 100, 256])
@pytest.mark.parametrize("is_sorted", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", "packed"])
def test_every_form_of_grouped_codes_means_what_it_says(
    version, is_sorted, group_size, bits, is_symmetric, formats
):
    """Case E02: act-order x group size x bits x symmetry, in each packing."""
    options = {
        "bits": bits, "group_size": group_size, "symmetric": is_symmetric, "is_sorted": is_sorted,
    }  # fmt: skip
    if version == "packed":
        tensors, meant = formats.packed(matrix(), **options)
    else:
        tensors, meant = formats.gptq(matrix(), **options, v2=version == "gptq_v2")
    stored = StoredQuantization(
        "packed" if version == "packed" else "gptq",
        bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        is_sorted=is_sorted,
        zeros_less_one=version == "gptq",
    )

    decoded = decode(stored, tensors)

    kinds = {"int4": GroupCodes, "int8": RowCodes, "plain": torch.Tensor}
    assert isinstance(decoded, kinds[stored.native.weights])
    assert np.allclose(dequantize(decoded, COLUMNS), meant, atol=1e-4)
    dense = decode(stored, tensors, kept="plain")
    assert np.allclose(dense, meant, atol=1e-4)


@pytest.mark.parametrize("zero", [0, 1, 8, 15, None])
@pytest.mark.parametrize("kind", ["gptq", "gptq_v2", "awq", "packed"])
def test_zero_points_at_both_ends_survive(kind, zero, formats):
    """Case E03: stored less one, 0 becomes 15; nothing carries into the next code."""
    stored = StoredQuantization(
        kind.removesuffix("_v2"),
        4,
        group_size=128,
        is_symmetric=False,
        zeros_less_one=kind == "gptq",
    )
    if kind == "awq":
        tensors, meant = formats.awq(matrix(), zero=zero)
    elif kind == "packed":
        tensors, meant = formats.packed(matrix(), symmetric=False, zero=zero)
    else:
        tensors, meant = formats.gptq(matrix(), symmetric=False, v2=kind == "gptq_v2", zero=zero)

    decoded = decode(stored, tensors)

    if zero is not None:
        assert decoded.zero_point.unique().tolist() == [zero]
    assert np.allclose(dequantize(decoded, COLUMNS), meant, atol=1e-4)


@pytest.mark.parametrize("group_size", [128, 64, -1])
def test_awq_codes_come_back_from_their_order(group_size, formats):
    tensors, meant = formats.awq(matrix(), group_size=group_size)
    stored = StoredQuantization("awq", 4, group_size=group_size, is_symmetric=False)

    assert np.allclose(dequantize(decode(stored, tensors), COLUMNS), meant, atol=1e-4)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("kind", ["float", "int"])
def test_rows_of_8_bits_have_one_scale_or_share_it(kind, strategy, formats):
    tensors, meant = formats.eight_bits(matrix(), kind, strategy)
    stored = StoredQuantization(
        "rows", 8, is_float=kind == "float", has_one_scale=strategy == "tensor"
    )

    decoded = decode(stored, tensors)

    assert decoded.scale.shape == (ROWS,)
    assert np.allclose(dequantize(decoded, COLUMNS), meant, atol=1e-5)
    assert np.allclose(decode(stored, tensors, kept="plain"), meant, atol=1e-5)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (200, 320), (40, 130), (257, 576)])
def test_blocks_of_fp8_are_cut_at_both_edges(rows, columns, scale_type, formats):
    """Case E18: sizes that are no multiples of 128."""
    tensors, meant = formats.blocks(matrix(rows, columns), scale_type=scale_type)
    stored = StoredQuantization("blocks", 8, is_float=True, scale_name="weight_scale_inv")

    decoded = decode(stored, tensors, rows, columns)

    assert isinstance(decoded, BlockCodes)
    assert np.allclose(dequantize(decoded, columns), meant, atol=1e-5)


def test_groups_of_uneven_size_are_filled_up(formats):
    """Case E01: any `g_idx`, also one whose groups differ in size."""
    tensors, _ = formats.gptq(matrix(), symmetric=False)
    group = torch.from_numpy(np.random.default_rng(2).integers(0, 3, COLUMNS).astype(np.int32))
    tensors["g_idx"] = group
    stored = StoredQuantization(
        "gptq", 4, group_size=128, is_symmetric=False, is_sorted=True, zeros_less_one=True
    )

    decoded = decode(stored, tensors)

    dense = decode(stored, tensors, kept="plain")
    assert decoded.codes.shape[1] > COLUMNS
    assert torch.allclose(dequantize(decoded, COLUMNS), dense, atol=1e-5)


@pytest.mark.parametrize("columns", [320, 576])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_stored_matrix_multiplies_as_it_means(is_sorted, columns, formats):
    """Case E01: both parts are sorted alike, and are one matrix."""
    stored = StoredQuantization(
        "gptq", 4, group_size=128, is_symmetric=False, is_sorted=is_sorted, zeros_less_one=True
    )
    parts = {"q": matrix(64, columns), "k": matrix(32, columns)}
    layer = build_linear(
        Projection({name: len(part) for name, part in parts.items()}, columns, False),
        as_stored(stored, stored.native),
        torch.float32,
        CPU,
    )
    written = {
        name: formats.gptq(part, symmetric=False, is_sorted=is_sorted)
        for name, part in parts.items()
    }
    for slot in layer.slots():
        name, suffix = slot.name.split(".")
        if suffix != "bias":
            slot.store(written[name][0][suffix])
    layer.pack()
    x = torch.randn(5, columns)

    weight = torch.from_numpy(np.concatenate([meant for _, meant in written.values()]))
    expected = x.double() @ weight.T

    assert len(layer.segments) == 1
    assert (layer(x) - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("method", "rows", "columns", "named"),
    [("gptq", 40, 12, "12 inputs"), ("gptq", 12, 64, "12 outputs"), ("awq", 12, 64, "12 outputs")],
)
def test_sizes_that_words_cannot_hold_are_refused(method, rows, columns, named):
    stored = StoredQuantization(method, 4)

    with pytest.raises(UnsupportedModel, match=named):
        list(reader_of(stored, "int4").pieces(rows, columns))


def test_a_group_without_a_scale_is_refused(formats):
    tensors, _ = formats.gptq(matrix())
    tensors["g_idx"][7] = 3
    stored = StoredQuantization("gptq", 4, group_size=128, zeros_less_one=True)

    with pytest.raises(BrokenCheckpoint, match="g_idx names group 3"):
        decode(stored, tensors)


def test_a_shape_that_differs_from_the_config_is_refused(formats):
    tensors, _ = formats.packed(matrix())
    tensors["weight_shape"] = torch.tensor([ROWS, COLUMNS - 1])

    with pytest.raises(BrokenCheckpoint, match="weight_shape is"):
        decode(StoredQuantization("packed", 4, group_size=128), tensors)


def test_zero_points_of_a_symmetric_file_are_kept_where_they_differ(formats):
    tensors, meant = formats.gptq(matrix(), symmetric=False)
    stored = StoredQuantization("gptq", 4, group_size=128, is_symmetric=True, zeros_less_one=True)

    assert np.allclose(dequantize(decode(stored, tensors), COLUMNS), meant, atol=1e-4)


def test_schemes_without_a_kernel_are_kept_plain():
    assert StoredQuantization("gptq", 4, group_size=32).native == PLAIN
    assert StoredQuantization("gptq", 4, group_size=127).native == PLAIN
    assert StoredQuantization("gptq", 8, group_size=128).native == PLAIN
    assert StoredQuantization("gptq", 8).native == Scheme("int8")
    assert StoredQuantization("awq", 4, group_size=256).native == Scheme("int4")
