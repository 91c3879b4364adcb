"""Speed of the engine beside transformers: same machine, same run, same weights, same precision.

`python benchmarks/engine.py --cpu` runs this: it serves SmolLM2-135M-Instruct in float32 and writes
`benchmarks/results/cpu/engine.json`. The answers of both are compared before any speed is reported,
which also warms both up. In every round candidate and baseline take turns, with the same threads,
and are compared with each other; a figure is the median of the rounds, with minimum and maximum.
Rounds in which other programs took processors away are counted, and the row says so.
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
sys.path.append(str(ROOT / "tools"))  # before what is imported from there

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
DISTURBED_PERCENT = 10
"""Of the machine's processors: when others take more, they slow a round visibly."""
Tokens = list[list[int]]


@dataclass(frozen=True)
class Round:
    """Tokens per second of both sides, one right after the other."""

    candidate: float
    baseline: float
    others_percent: float
    """Of the machine's processor time in this round, what other programs took."""


def rows(what: str, rounds: Sequence[Round], bar: float | None) -> list[dict[str, Any]]:
    """The speed, and its ratio to the baseline's round by round, which is what the bar is about."""
    baseline = [one.baseline for one in rounds]
    num_disturbed = sum(one.others_percent > DISTURBED_PERCENT for one in rounds)
    note = f"others took processors in {num_disturbed} of {len(rounds)} rounds"
    shown = {"note": note} if num_disturbed else {}
    speed = {
        "name": what,
        "unit": "tokens/s",
        "bar": None,
        **_spread([one.candidate for one in rounds], 1),
        "baseline": round(statistics.median(baseline), 1),
        "baseline_min": round(min(baseline), 1),
        "baseline_max": round(max(baseline), 1),
        "others_percent": [round(one.others_percent) for one in rounds],
    }
    ratio = {
        "name": f"{what}, against transformers.generate",
        "unit": "times",
        "bar": bar,
        **_spread([one.candidate / one.baseline for one in rounds], 2),
    }
    return [speed | shown, ratio | shown]


def _spread(values: Sequence[float], digits: int) -> dict[str, Any]:
    return {
        "value": round(statistics.median(values), digits),
        "better": "higher",
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


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
    candidate: Candidate, baseline: Baseline, prompts: Tokens, num_new: int, num_rounds: int
) -> list[Round]:
    """Let both answer in turn, once to warm up and then `num_rounds` times."""
    check_equal(candidate.generate(prompts, num_new), baseline.generate(prompts, num_new))
    # Reading a prompt for one token measures the prompt, anything longer the answer.
    num_tokens = len(prompts) * (num_new if num_new > 1 else len(prompts[0]))
    rounds = []
    for number in range(num_rounds):
        sides: list[Candidate | Baseline] = [candidate, baseline]
        speeds = {}
        started, others = time.perf_counter(), others_seconds()
        for side in sides if number % 2 == 0 else reversed(sides):
            speeds[side] = num_tokens / seconds(side.generate, prompts, num_new)
        available = (time.perf_counter() - started) * (os.cpu_count() or 1)
        others_percent = 100 * (others_seconds() - others) / available
        rounds.append(Round(speeds[candidate], speeds[baseline], others_percent))
        show(
            f"  round {number + 1}/{num_rounds}: {speeds[candidate]:.1f} tokens/s, "
            f"transformers {speeds[baseline]:.1f}, others took {others_percent:.0f} % of the "
            "processors"
        )
    return rounds


def others_seconds() -> float:
    """Processor time that other programs have had, and other machines of the same host."""
    ticks = busy_ticks(Path("/proc/stat").read_text())
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def busy_ticks(stat: str) -> int:
    """What the first line of /proc/stat says all processors have done since the start."""
    # Guests, which follow, are in the user's time already.
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split(maxsplit=9)[1:9])
    return user + nice + system + irq + softirq + steal


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


def run_cpu(num_rounds: int) -> dict[str, Any]:
    """All rows of the CPU table."""
    path = model_tool.fetch()
    show(f"loading the model twice; load {os.getloadavg()[0]:.1f}")
    candidate, baseline = Candidate(path), Baseline(path)
    threads = torch.get_num_threads()  # the engine takes no more than its container may use
    vocab_size = candidate.engine.vocab_size
    short = prompts_of(NUM_CONCURRENT, PROMPT_TOKENS, vocab_size)
    long = prompts_of(1, LONG_PROMPT_TOKENS, vocab_size)
    ceilings = measure_ceilings(candidate.engine.stats().measured_bytes["weights"])
    load_before = os.getloadavg()[0]
    show(f"1 request, {PROMPT_TOKENS} tokens in, {NEW_TOKENS} out; {threads} threads each")
    single = compare(candidate, baseline, short[:1], NEW_TOKENS, num_rounds)
    show(f"{NUM_CONCURRENT} requests at once against one after the other")
    concurrent = compare(candidate, baseline, short, NEW_TOKENS, num_rounds)
    show(f"a prompt of {LONG_PROMPT_TOKENS} tokens")
    prompt = compare(candidate, baseline, long, 1, num_rounds)
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
            *rows(of_one, single, 1.0),
            *rows(of_eight, concurrent, 3.0),
            *rows(of_prompt, prompt, None),
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
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds a row (9)")
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
        verdict += f"; {row['note']}" if "note" in row else ""
        show(f"{row['value']:>8} {row['unit']:<9} {row['name']}  {verdict}")
    show(f"ceilings: {result['ceilings']}")
    show(f"written to {options.output}")
    return int(any(is_missed(row) for row in result["rows"]))
