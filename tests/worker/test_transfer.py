"""Tensors from files to a device in pieces, ahead of who asks for them.

A CPU takes the same way, without streams; `test_gpu.py` has a GPU's.
"""

from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.weights import transfer
from deepseek_worker.weights.loading import reading
from deepseek_worker.weights.safetensors import DTYPES, SafetensorsCheckpoint
from deepseek_worker.weights.transfer import Extent, Transfer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)
    monkeypatch.setattr(transfer, "AHEAD_BYTES", 5000)


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """Of every type, and of sizes that end within, at and after a piece."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(), (0,), (1000,), (1001,), (31, 100), (3, 700)]
    tensors = {}
    for index, dtype in enumerate(DTYPES.values()):
        size = sizes[index % len(sizes)]
        num_bytes = torch.empty(size, dtype=dtype).nbytes
        data = torch.randint(0, 2, (num_bytes,), dtype=torch.uint8, generator=generator)
        tensors[f"t{index}"] = data.view(dtype).view(size)
    (tmp_path / "config.json").write_text((tiny[0] / "config.json").read_text())
    save_file(dict(list(tensors.items())[:5]), tmp_path / "one.safetensors", {"format": "pt"})
    save_file(dict(list(tensors.items())[5:]), tmp_path / "two.safetensors")
    return SafetensorsCheckpoint(tmp_path)


def extents(checkpoint):
    found = {name: checkpoint.extent(name) for name in sorted(checkpoint.shapes)}
    assert None not in found.values()
    return found


def test_every_tensor_arrives_as_it_is_stored(checkpoint):
    with closing(Transfer(extents(checkpoint), CPU)) as moving:
        for name in sorted(checkpoint.shapes):
            arrived, stored = moving.tensor(name), checkpoint.tensor(name)
            assert arrived.dtype == stored.dtype
            assert arrived.shape == stored.shape
            assert torch.equal(
                arrived.reshape(-1).view(torch.uint8), stored.reshape(-1).view(torch.uint8)
            )


def test_those_that_come_next_are_under_way_up_to_a_limit(checkpoint, tmp_path):
    (tmp_path / "bytes").write_bytes(bytes(range(250)) * 60)
    sizes = [2000, 3000, 2500, 6000, 500, 500, 500]
    places = {
        f"t{index}": Extent(tmp_path / "bytes", index, size, torch.uint8, (size,))
        for index, size in enumerate(sizes)
    }
    ahead = []
    with closing(Transfer(places, CPU)) as moving:
        for name, place in places.items():
            arrived = moving.tensor(name)
            assert arrived[:3].tolist() == [(place.first_byte + i) % 250 for i in range(3)]
            ahead.append(sorted(moving._started))

    # 6,000 bytes are more than the limit: they go alone.
    assert ahead == [["t1"], ["t2"], ["t3"], ["t4", "t5", "t6"], ["t5", "t6"], ["t6"], []]


def test_a_tensor_that_was_not_announced_is_an_error_and_not_a_wait(checkpoint):
    with closing(Transfer(extents(checkpoint), CPU)) as moving:
        moving.tensor("t0")
        with pytest.raises(KeyError):
            moving.tensor("t0")


def test_a_file_that_becomes_shorter_is_named(checkpoint, tmp_path):
    found = extents(checkpoint)
    with (tmp_path / "two.safetensors").open("r+b") as file:
        file.truncate(300)

    with (
        closing(Transfer(found, CPU)) as moving,
        pytest.raises(BrokenCheckpoint, match=r"two\.safetensors became shorter"),
    ):
        list(map(moving.tensor, found))


def test_a_file_that_is_gone_is_named(checkpoint, tmp_path):
    found = extents(checkpoint)
    (tmp_path / "one.safetensors").unlink()

    with pytest.raises(BrokenCheckpoint, match=r"one\.safetensors cannot be read: No such file"):
        Transfer(found, CPU)


def test_closing_ends_what_is_under_way(checkpoint):
    moving = Transfer(extents(checkpoint), CPU)
    moving.tensor("t0")

    moving.close()
    moving.close()

    assert not any(thread.is_alive() for thread in moving._threads._threads)
    with pytest.raises((KeyError, RuntimeError)):
        moving.tensor("t1")


def test_a_cpu_reads_what_it_is_asked_for(checkpoint):
    with reading(checkpoint, [], CPU) as read:
        assert read == checkpoint.tensor
