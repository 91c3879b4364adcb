"""The two percentages that people and the autoscaler look at."""

from dataclasses import replace

import pytest

from deepseek_worker.stats import EngineStats

IDLE = EngineStats(
    num_running=0,
    num_waiting=0,
    pool_pages=10,
    free_pages=4,
    cached_pages=6,
    held_pages=0,
    waiting_pages=0,
    page_tokens=16,
    predicted_bytes={},
    measured_bytes={"weights": 400, "kv_cache": 500, "workspace": 60, "context": 40},
    page_bytes=50,
    limit_bytes=1000,
    num_steps=0,
    num_preemptions=0,
    num_out_of_memory_retries=0,
    num_out_of_memory_failures=0,
    is_exhausted=False,
    num_non_finite_logits=0,
    num_prompt_tokens=0,
    num_generated_tokens=0,
    num_cached_tokens=0,
)


def test_an_idle_pool_is_no_use_and_no_demand():
    assert IDLE.used_percent == 50.0
    assert IDLE.demand_percent == 0.0


def test_held_pages_are_used_and_asked_for():
    busy = replace(IDLE, held_pages=5, cached_pages=1)

    assert busy.used_percent == 75.0
    assert busy.demand_percent == 50.0


def test_demand_may_exceed_the_pool():
    assert replace(IDLE, held_pages=10, waiting_pages=15).demand_percent == pytest.approx(250)
