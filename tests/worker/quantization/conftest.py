"""Writers of the storage formats, by their definitions, bit by bit in numpy.

Each takes a matrix `[out, in]` and returns the tensors of the file and the matrix that they mean.
Nothing here is shared with the worker's readers.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes, bits, axis, order=None):
    """Pack along an axis, the first code in the lowest bits; a rest is filled with zeros."""
    codes = np.moveaxis(np.asarray(codes, np.uint32), axis, 0)
    in_word = 32 // bits
    packed = np.zeros((-(-len(codes) // in_word), *codes.shape[1:]), np.uint32)
    for word in range(len(packed)):
        for place in range(in_word):
            index = word * in_word + (order or range(in_word))[place]
            if index < len(codes):
                packed[word] |= codes[index] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, 0, axis)).view(np.int32))


def grouped(weight, bits, group_size, symmetric, is_sorted, seed, zero_value=None):
    """Codes, scales, zero points, the group of each input, and what they mean."""
    draw = np.random.default_rng(seed)
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    group = np.arange(columns) // size
    if is_sorted:
        group = draw.permutation(group)
    count, top = int(group.max()) + 1, 2**bits - 1
    scale = np.zeros((rows, count), np.float16)
    zero = np.full((rows, count), 2 ** (bits - 1))
    for index in range(count):
        part = weight[:, group == index]
        if symmetric:
            scale[:, index] = np.abs(part).max(1) / (top // 2)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale[:, index] = (high - low) / top
            zero[:, index] = np.clip(np.round(-low / scale[:, index]), 0, top)
            if zero_value is not None:
                zero[:, index] = zero_value
    spread = scale[:, group].astype(np.float64)
    codes = np.clip(np.round(weight / spread) + zero[:, group], 0, top)
    return codes, scale, zero, group, (codes - zero[:, group]) * spread


def gptq(
    weight, bits=4, group_size=128, symmetric=True, is_sorted=False, v2=False, seed=0, zero=None
):
    codes, scale, zeros, group, meant = grouped(
        weight, bits, group_size, symmetric, is_sorted, seed, zero
    )
    stored_zeros = zeros if v2 else (zeros - 1) % 2**bits
    return {
        "qweight": words(codes.T, bits, 0),
        "qzeros": words(stored_zeros.T, bits, 1),
        "scales": torch.from_numpy(scale.T.copy()),
        "g_idx": torch.from_numpy(group.astype(np.int32)),
    }, meant


def awq(weight, group_size=128, seed=0, zero=None):
    codes, scale, zeros, _, meant = grouped(weight, 4, group_size, False, False, seed, zero)
    return {
        "qweight": words(codes.T, 4, 1, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, 1, AWQ_ORDER),
        "scales": torch.from_numpy(scale.T.copy()),
    }, meant


def packed(weight, bits=4, group_size=128, symmetric=True, is_sorted=False, seed=0, zero=None):
    codes, scale, zeros, group, meant = grouped(
        weight, bits, group_size, symmetric, is_sorted, seed, zero
    )
    tensors = {
        "weight_packed": words(codes, bits, 1),
        "weight_scale": torch.from_numpy(scale),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros, bits, 0)
    if is_sorted:
        tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
    return tensors, meant


def eight_bits(weight, kind="float", strategy="channel"):
    largest = 448.0 if kind == "float" else 127.0
    magnitude = np.abs(weight).max(1, keepdims=True)
    if strategy == "tensor":
        magnitude = magnitude.max(keepdims=True)[0]
    scale = torch.from_numpy((magnitude / largest).astype(np.float32)).to(torch.bfloat16)
    codes = torch.from_numpy(weight) / scale.double()
    codes = codes.to(torch.float8_e4m3fn) if kind == "float" else codes.round().clamp(-127, 127)
    codes = codes if kind == "float" else codes.to(torch.int8)
    meant = codes.double() * scale.double()
    return {"weight": codes, "weight_scale": scale}, meant.numpy()


def blocks(weight, scale_name="weight_scale_inv", scale_type=torch.float32):
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // 128), -(-columns // 128))
    codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    meant = np.zeros_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            value = np.abs(weight[place]).max() / 448
            if scale_type == torch.float8_e8m0fnu:
                value = 2.0 ** np.ceil(np.log2(value))
            scale[i, j] = value
            codes[place] = (torch.from_numpy(weight[place]) / scale[i, j]).to(torch.float8_e4m3fn)
            meant[place] = codes[place].double().numpy() * float(scale[i, j])
    return {"weight": codes, scale_name: scale.to(scale_type)}, meant


@pytest.fixture(scope="session")
def formats():
    return SimpleNamespace(
        gptq=gptq, awq=awq, packed=packed, eight_bits=eight_bits, blocks=blocks, grouped=grouped
    )


SHAPE = {"hidden_size": 160, "intermediate_size": 288, "head_dim": 40}


@pytest.fixture
def save_quantized(make_checkpoint, tmp_path):
    """Save a tiny model with its projections stored by a writer; returns folder and model.

    The model that is returned computes with the matrices that the files mean.
    """

    def save(write, quantization_config, *, kind="llama", skip=(), edit=None, **changes):
        source, model = make_checkpoint(kind, std=0.08, **(SHAPE | changes))
        tensors = load_file(source / "model.safetensors")
        state = dict(model.state_dict())
        seed = 0
        for name in list(tensors):
            is_projection = name.endswith("_proj.weight") and not any(part in name for part in skip)
            if not is_projection:
                continue
            module = name.removesuffix(".weight")
            seed += 1
            # Projections of the same input are sorted alike, as the writers of such files do.
            same = module.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
            same = same.replace("up_proj", "gate_proj")
            options = {"seed": sum(map(ord, same))} if "seed" in write.__code__.co_varnames else {}
            stored, meant = write(tensors.pop(name).double().numpy(), **options)
            tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}
            state[name] = torch.from_numpy(meant).float()
        model.load_state_dict(state)
        if edit is not None:
            edit(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            tmp_path / "model.safetensors",
        )
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = quantization_config
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path, model

    return save
