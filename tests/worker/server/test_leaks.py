"""Thousands of requests, many of whose clients leave: the process holds what it held before."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from worker_process import NAME, Process

# The first thousand widens what the allocators keep. They go on to do so, by less and less: 2 to
# 5 MiB in each of the next batches. A leak is in every batch, on top of that.
NUM_WARMING, NUM_BATCHES, BATCH_REQUESTS = 1000, 4, 500
AT_ONCE = 24
LEAKED_BYTES_PER_REQUEST = 8 << 10


def body(draw: random.Random) -> dict[str, Any]:
    kind: dict[str, Any] = draw.choice(
        [
            {},
            {"n": 2, "temperature": 1, "top_p": 0.9},
            {"logprobs": 3, "echo": True},
            {"structured_outputs": {"regex": f"[a-z]{{1,{draw.randint(1, 300)}}}"}},
            {"response_format": {"type": "json_object"}},
            {"prompt_logprobs": 1},
            {"stop": ["a", "bc"]},
        ]
    )
    # Some share their beginning, so that pages are shared too.
    prompt = "the same beginning of them all, and then " * draw.randint(0, 2) + str(draw.random())
    asked = {"model": NAME, "prompt": prompt, "max_tokens": draw.randint(1, 16), **kind}
    return asked if "prompt_logprobs" in kind else asked | {"stream": draw.random() < 0.6}


async def ask(client: httpx.AsyncClient, draw: random.Random) -> str:
    """One request, whose client may leave before or within its answer."""
    asked = body(draw)
    leaves_after = draw.choice([None, None, 0, 1, 3])
    try:
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200, await response.aread()
            async for number, _ in _numbered(response):
                if number == leaves_after:
                    return "left"
    except httpx.ReadTimeout:
        return "left"
    return "answered"


async def _numbered(response: httpx.Response) -> Any:
    number = 0
    async for line in response.aiter_lines():
        yield number, line
        number += 1


async def crowd(url: str, number: int, seed: int) -> list[str]:
    draws = [random.Random(seed + at) for at in range(number)]
    gate = asyncio.Semaphore(AT_ONCE)
    # Some do not wait for the beginning of their answer.
    patient, hasty = httpx.Timeout(120), httpx.Timeout(120, read=0.05)
    async with (
        httpx.AsyncClient(base_url=url, timeout=patient) as client,
        httpx.AsyncClient(base_url=url, timeout=hasty) as other,
    ):

        async def one(draw: random.Random) -> str:
            async with gate:
                return await ask(other if draw.random() < 0.1 else client, draw)

        return await asyncio.gather(*map(one, draws))


def resident_bytes(process: Process) -> int:
    """Of all processes of the worker together."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in process.pids()]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("VmRSS")]
    return sum(int(line.split()[1]) * 1024 for line in lines)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_two_thousand_requests_with_random_aborts_leave_nothing_behind(
    quick_model: Path, tmp_path: Path
) -> None:
    process = Process(quick_model, tmp_path, "--max-context-tokens=512", "--kv-cache-bytes=4000000")
    try:
        process.wait_until_ready()
        asyncio.run(crowd(process.url, NUM_WARMING, 0))
        pages, outcomes = process.idle_pages(), []
        resident = [resident_bytes(process)]

        for batch in range(1, NUM_BATCHES + 1):
            outcomes += asyncio.run(crowd(process.url, BATCH_REQUESTS, 10_000 * batch))
            assert process.idle_pages() == pages
            resident.append(resident_bytes(process))

        grown = [after - before for before, after in itertools.pairwise(resident)]
        assert min(grown) < LEAKED_BYTES_PER_REQUEST * BATCH_REQUESTS, grown
        assert outcomes.count("left") > 500
        assert outcomes.count("answered") > 500
        log = process.log.read_text()
        assert '"level": "ERROR"' not in log
    finally:
        assert process.stop() == 0
