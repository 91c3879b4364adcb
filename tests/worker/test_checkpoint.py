"""Opening either format gives the same four things."""

import gguf
import numpy as np
import pytest
import torch

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.weights.checkpoint import open_checkpoint


def test_a_folder_gives_names_shapes_and_tensors(tiny):
    checkpoint = open_checkpoint(tiny[0])

    name = "model.layers.0.self_attn.k_proj.weight"
    assert checkpoint.shapes[name] == (32, 64)
    assert torch.equal(checkpoint.tensor(name), tiny[1].state_dict()[name])
    assert checkpoint.config.num_layers == 2


def test_a_gguf_file_without_its_numbers_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(BrokenCheckpoint, match=r"lacks llama\.attention\.head_count"):
        open_checkpoint(tmp_path)
