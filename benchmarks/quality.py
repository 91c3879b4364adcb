"""Perplexity of the embedded model in every format of weights and of the KV cache.

`python benchmarks/quality.py` reads the text in `tests/worker/texts` with SmolLM2-135M-Instruct on
a CPU and writes `benchmarks/results/cpu/quality.json`. The reference is transformers' model of the
same file in float32. A row is how much higher, in percent, the perplexity is.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

import engine_cpu  # noqa: E402

import model as model_tool  # noqa: E402
from deepseek_worker.config import EngineConfig  # noqa: E402
from deepseek_worker.sequence import Request, SamplingParams  # noqa: E402
from deepseek_worker.startup import load_engine  # noqa: E402
from deepseek_worker.tokenizer import load_tokenizer  # noqa: E402

TEXT = ROOT / "tests/worker/texts/wonderland.txt"
# What is measured, the worker's options, and the bar in percent.
FORMATS: tuple[tuple[str, dict[str, str], float | None], ...] = (
    ("bf16", {"dtype": "bfloat16"}, 0.1),
    ("FP8 weights, inputs in 16 bits", {"weights": "fp8", "activations": "16bit"}, 0.5),
    ("FP8 weights, inputs in FP8", {"weights": "fp8"}, 0.5),
    ("INT8 weights, inputs in 16 bits", {"weights": "int8"}, 0.5),
    ("INT8 weights, inputs in INT8", {"weights": "int8", "activations": "8bit"}, 0.5),
    ("INT4 weights, rounded to nearest in groups of 128", {"weights": "int4"}, None),
    (
        "FP8 weights, calibrated, inputs in 16 bits",
        {"weights": "fp8", "activations": "16bit", "rounding": "calibrated"},
        0.5,
    ),
    (
        "FP8 weights, calibrated, inputs in FP8",
        {"weights": "fp8", "rounding": "calibrated"},
        0.5,
    ),
    (
        "INT8 weights, calibrated, inputs in 16 bits",
        {"weights": "int8", "rounding": "calibrated"},
        0.5,
    ),
    (
        "INT8 weights, calibrated, inputs in INT8 but of `down`",
        {"weights": "int8", "activations": "8bit", "rounding": "calibrated"},
        0.5,
    ),
    (
        "INT4 weights, calibrated, in groups of 128",
        {"weights": "int4", "rounding": "calibrated"},
        None,
    ),
    ("KV cache in fp8", {"kv_cache": "fp8"}, None),
    ("KV cache in int8", {"kv_cache": "int8"}, 0.5),
)


def perplexity(model: Path, token_ids: list[int], **options: str) -> float:
    """Of the text, read by the worker's engine in chunks."""
    config = EngineConfig(
        model=model, device="cpu", max_batch_tokens=1024, kv_cache_bytes=2**28, **options
    )
    worker = load_engine(config, lambda _: None)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    worker.add(Request("text", tuple(token_ids), sampling))
    logprobs = []
    while worker.has_work():
        for output in worker.step():
            logprobs += [row.logprob for row in output.prompt_logprobs or () if row is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


@torch.inference_mode()
def reference_perplexity(model: Path, token_ids: list[int]) -> float:
    """The same by transformers in float32."""
    reference = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    ).eval()
    scores = reference(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    targets = torch.tensor(token_ids[1:])
    return math.exp(-scores.gather(1, targets[:, None]).mean().item())


def measure(num_tokens: int | None, only: Sequence[str]) -> dict[str, Any]:
    """The rows whose names contain one of `only`, or all."""
    model = model_tool.fetch()
    token_ids = load_tokenizer(model).encode(TEXT.read_text(encoding="utf-8"))[:num_tokens]
    reference = reference_perplexity(model, token_ids)
    print(f"{len(token_ids)} tokens, reference {reference:.4f}", flush=True)
    rows = []
    for what, options, bar in FORMATS:
        if only and not any(part in what for part in only):
            continue
        percent = (perplexity(model, token_ids, **options) / reference - 1) * 100
        print(f"{what}: {percent:+.3f} %", flush=True)
        row = {"name": what, "value": round(percent, 3), "unit": "% above", "better": "lower"}
        rows.append(row if bar is None else row | {"bar": bar})
    return {
        "gpu": None,
        "versions": engine_cpu.versions(),
        "commit": engine_cpu.commit(),
        "tokens": len(token_ids),
        "ceilings": {"reference_perplexity": round(reference, 4)},
        "rows": rows,
    }


def merged(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Replace the measured rows of a result, and say of them what was measured."""
    measured = {row["name"]: row | {"commit": result["commit"]} for row in result["rows"]}
    rows = [measured.pop(row["name"], row) for row in before["rows"]]
    return before | {"rows": [*rows, *measured.values()]}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, help="of the text's beginning; all by default")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names; other rows stay")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/cpu/quality.json")
    options = parser.parse_args()
    result = measure(options.tokens, options.only)
    if options.only:
        result = merged(json.loads(options.output.read_text()), result)
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
