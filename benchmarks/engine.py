"""Speed of the engine beside transformers: same machine, same run, same weights, same precision.

`python benchmarks/engine.py --cpu` serves SmolLM2-135M-Instruct in float32 and writes
`benchmarks/results/cpu/engine.json`. Candidate and baseline take turns, so that a busy moment of
the machine meets both; every figure is the median of the rounds, with minimum and maximum. The
answers of both are compared before any speed is reported.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

# As `deepseek-worker serve` sets it, for both sides; OpenMP reads it when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

import model as model_tool  # noqa: E402
from deepseek_worker.config import EngineConfig  # noqa: E402
from deepseek_worker.engine import Engine  # noqa: E402
from deepseek_worker.sequence import Request, SamplingParams  # noqa: E402
from deepseek_worker.startup import load_engine  # noqa: E402
from deepseek_worker.weights.checkpoint import open_checkpoint  # noqa: E402

NUM_CONCURRENT = 8
PROMPT_TOKENS = 64
NEW_TOKENS = 64
LONG_PROMPT_TOKENS = 512
COPY_BYTES = 2**30
Tokens = list[list[int]]


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of both sides, round by round."""

    candidate: list[float]
    baseline: list[float]

    def rows(self, what: str, bar: float | None) -> list[dict[str, Any]]:
        """The speed, and its ratio to the baseline's, which is what the bar is about."""
        candidate, baseline = map(statistics.median, (self.candidate, self.baseline))
        speed = {
            "name": what,
            "value": round(candidate, 1),
            "unit": "tokens/s",
            "better": "higher",
            "bar": None,
            "min": round(min(self.candidate), 1),
            "max": round(max(self.candidate), 1),
            "baseline": round(baseline, 1),
            "baseline_min": round(min(self.baseline), 1),
            "baseline_max": round(max(self.baseline), 1),
        }
        ratio = {
            "name": f"{what}, against transformers.generate",
            "value": round(candidate / baseline, 2),
            "unit": "times",
            "better": "higher",
            "bar": bar,
        }
        return [speed, ratio]


class Candidate:
    """Our engine, without prefix cache: every prompt is read in full."""

    def __init__(self, path: Path) -> None:
        config = EngineConfig(model=path, device="cpu", dtype="float32", prefix_cache=False)
        started = time.perf_counter()
        self.engine: Engine = load_engine(config, lambda _: None)
        self.load_seconds = time.perf_counter() - started

    def generate(self, prompts: Tokens, num_new: int) -> Tokens:
        """Answer all prompts together."""
        sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        answers: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            answers[str(index)] = []
            self.engine.add(Request(str(index), tuple(prompt), sampling))
        while self.engine.has_work():
            for output in self.engine.step():
                answers[output.request_id] += output.token_ids
        return list(answers.values())


class Baseline:
    """`transformers.generate`, one prompt after the other."""

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        shape = checkpoint.config
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=shape.max_position_embeddings,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
            tie_word_embeddings=shape.tie_word_embeddings,
        )
        self.model = LlamaForCausalLM(config).eval()
        weights = {name: checkpoint.tensor(name) for name in checkpoint.shapes}
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise RuntimeError(f"the baseline lacks {missing} and has left over {unexpected}")

    @torch.inference_mode()
    def generate(self, prompts: Tokens, num_new: int) -> Tokens:
        """Answer the prompts in turn."""
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            answer = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=num_new,
                max_new_tokens=num_new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers.append(answer[0, len(prompt) :].tolist())
        return answers


def prompts_of(num_prompts: int, num_tokens: int, vocab_size: int) -> Tokens:
    """Different, reproducible prompts."""
    generator = torch.Generator().manual_seed(num_prompts * num_tokens)
    return torch.randint(100, vocab_size, (num_prompts, num_tokens), generator=generator).tolist()


def compare(
    candidate: Candidate, baseline: Baseline, prompts: Tokens, num_new: int, rounds: int
) -> Comparison:
    """Let both answer in turn, once to warm up and then `rounds` times."""
    check_equal(candidate.generate(prompts, num_new), baseline.generate(prompts, num_new))
    comparison = Comparison([], [])
    # Reading a prompt for one token measures the prompt, anything longer the answer.
    num_tokens = len(prompts) * (num_new if num_new > 1 else len(prompts[0]))
    for number in range(rounds):
        sides = [(comparison.candidate, candidate), (comparison.baseline, baseline)]
        for figures, side in sides if number % 2 == 0 else reversed(sides):
            figures.append(num_tokens / seconds(side.generate, prompts, num_new))
        show(
            f"  round {number + 1}/{rounds}: {comparison.candidate[-1]:.1f} tokens/s, "
            f"transformers {comparison.baseline[-1]:.1f}"
        )
    return comparison


def check_equal(ours: Tokens, theirs: Tokens) -> None:
    """Refuse to measure an engine that answers something else."""
    if ours != theirs:
        raise RuntimeError("the engine's greedy answers differ from transformers'; not measured")


def seconds(call: Callable[..., Any], *arguments: Any) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def measure_ceilings(weight_bytes: int) -> dict[str, Any]:
    """What the machine can do at best, in this run."""
    memory = torch.ones(COPY_BYTES // 4)
    read = COPY_BYTES / min(seconds(memory.sum) for _ in range(5))
    a, b = torch.randn(2, 2048, 2048)
    flops = 2 * 2048**3 / min(seconds(torch.mm, a, b) for _ in range(5))
    return {
        "read_gb_per_second": round(read / 1e9, 1),
        "float32_gflop_per_second": round(flops / 1e9),
        "weight_bytes_per_step": weight_bytes,
        "single_request_tokens_per_second": round(read / weight_bytes, 1),
    }


def versions() -> dict[str, str]:
    """What the figures depend on."""
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"python": platform.python_version(), **packages}


def commit() -> str:
    """The checked-out commit, marked when files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "worker", "contract")
    return git("rev-parse", "HEAD") + ("-changed" if changed else "")


def processor() -> str:
    """Name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def run_cpu(rounds: int) -> dict[str, Any]:
    """All rows of the CPU table."""
    path = model_tool.fetch()
    threads = torch.get_num_threads()
    show(f"loading the model twice; {threads} threads, load {os.getloadavg()[0]:.1f}")
    candidate, baseline = Candidate(path), Baseline(path)
    vocab_size = candidate.engine.vocab_size
    short = prompts_of(NUM_CONCURRENT, PROMPT_TOKENS, vocab_size)
    long = prompts_of(1, LONG_PROMPT_TOKENS, vocab_size)
    ceilings = measure_ceilings(candidate.engine.stats().measured_bytes["weights"])
    load_before = os.getloadavg()[0]
    show(f"1 request, {PROMPT_TOKENS} tokens in, {NEW_TOKENS} out")
    single = compare(candidate, baseline, short[:1], NEW_TOKENS, rounds)
    show(f"{NUM_CONCURRENT} requests at once against one after the other")
    concurrent = compare(candidate, baseline, short, NEW_TOKENS, rounds)
    show(f"a prompt of {LONG_PROMPT_TOKENS} tokens")
    prompt = compare(candidate, baseline, long, 1, rounds)
    of_one = f"1 request, {PROMPT_TOKENS} in, {NEW_TOKENS} out"
    of_eight = f"{NUM_CONCURRENT} requests at once, {PROMPT_TOKENS} in, {NEW_TOKENS} out each"
    of_prompt = f"reading a prompt of {LONG_PROMPT_TOKENS}"
    return {
        "gpu": None,
        "versions": versions() | {"cpu": processor(), "threads": str(threads)},
        "environment": {"GOMP_SPINCOUNT": os.environ["GOMP_SPINCOUNT"]},
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "ceilings": ceilings,
        "rows": [
            *single.rows(of_one, 1.0),
            *concurrent.rows(of_eight, 3.0),
            *prompt.rows(of_prompt, None),
            {
                "name": "from the file to the first request",
                "value": round(candidate.load_seconds, 2),
                "unit": "s",
                "better": "lower",
                "bar": 5.0,
            },
        ],
    }


def is_missed(row: dict[str, Any]) -> bool:
    """Whether a row has a bar and does not reach it."""
    if row["bar"] is None:
        return False
    is_met = row["value"] >= row["bar"] if row["better"] == "higher" else row["value"] <= row["bar"]
    return not is_met


def show(line: str) -> None:
    """Progress goes to the terminal at once."""
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", required=True, help="measure on the CPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds a row (5)")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "cpu" / "engine.json"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = run_cpu(options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    for row in result["rows"]:
        verdict = "" if row["bar"] is None else f"bar {row['bar']}"
        verdict += ", MISSED" if is_missed(row) else ""
        show(f"{row['value']:>8} {row['unit']:<9} {row['name']}  {verdict}")
    show(f"ceilings: {result['ceilings']}")
    show(f"written to {options.output}")
    return int(any(is_missed(row) for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
