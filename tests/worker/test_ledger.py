"""Dividing the limit between weights, workspace and pages."""

from dataclasses import replace

import pytest

from deepseek_worker.errors import ModelTooLarge
from deepseek_worker.memory.ledger import (
    GIB,
    MAX_DEFAULT_CPU_POOL_BYTES,
    AdapterBytes,
    MemoryRequest,
    plan_memory,
    shape_of,
)
from deepseek_worker.models.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    "llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 8192, RopeConfig(), True, False, False, False,
    "bfloat16", frozenset(),
)  # fmt: skip
REQUEST = MemoryRequest(
    limit_bytes=8 * GIB,
    kv_cache_bytes=None,
    weight_bytes=134_515_008 * 4,
    kv_cache=("float32",) * 30,
    activation_bytes=4,
    page_tokens=16,
    max_context_tokens=8192,
    max_running_requests=256,
    max_batch_tokens=512,
    is_cpu=True,
    packs_tied_head=False,
)
PAGE_BYTES = 30 * 2 * 3 * 64 * 16 * 4


def plan(**changes):
    return plan_memory(shape_of(CONFIG), replace(REQUEST, **changes))


def test_pages_of_8_bits_are_as_many_more_as_they_are_smaller():
    mixed = plan(kv_cache=("bf16",) * 2 + ("fp8",) * 28, kv_cache_bytes=100 * PAGE_BYTES)

    assert mixed.page_bytes == PAGE_BYTES // 30 * 2 // 2 + PAGE_BYTES // 30 * 28 // 4
    assert mixed.num_pages == 100 * PAGE_BYTES // mixed.page_bytes


def test_a_cpu_takes_a_bounded_pool_by_default():
    assert plan().num_pages == MAX_DEFAULT_CPU_POOL_BYTES // PAGE_BYTES


def test_a_gpu_takes_what_is_left():
    subject = plan(is_cpu=False)

    assert sum(subject.predicted_bytes.values()) <= 8 * GIB
    assert sum(subject.predicted_bytes.values()) > 8 * GIB - 2 * PAGE_BYTES


def test_no_more_pages_than_all_requests_can_use():
    assert plan(max_running_requests=2, max_context_tokens=160).num_pages == 20


def test_a_given_size_is_taken_as_given():
    assert plan(kv_cache_bytes=PAGE_BYTES * 7 + 5).num_pages == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"limit_bytes": GIB},
        {"kv_cache_bytes": 100 * GIB},
        {"kv_cache_bytes": PAGE_BYTES - 1},
    ],
    ids=["limit below the weights", "pool above the limit", "pool below one page"],
)
def test_what_does_not_fit_says_how_much_of_what_is_needed(changes):
    with pytest.raises(ModelTooLarge, match=r"weights 513 MiB, kv_cache [\d,]+ MiB"):
        plan(**changes)


def test_a_packed_copy_of_the_head_is_part_of_the_workspace():
    more = plan(packs_tied_head=True).predicted_bytes["workspace"]

    assert more - plan().predicted_bytes["workspace"] == 49152 * 576 * 4


def test_captured_steps_leave_fewer_pages():
    bounded = {"is_cpu": False, "limit_bytes": 2 * GIB}

    assert plan(**bounded).num_pages - plan(**bounded, graph_bytes=3 * PAGE_BYTES).num_pages == 3


def test_adapters_are_weights_and_workspace_and_leave_fewer_pages():
    bounded = {"is_cpu": False, "limit_bytes": 2 * GIB}
    without = plan(**bounded)

    with_ = plan(**bounded, adapters=AdapterBytes(weights=100 * PAGE_BYTES, workspace=PAGE_BYTES))

    assert without.num_pages - with_.num_pages == 101
    more = {
        kind: size - without.predicted_bytes[kind] for kind, size in with_.predicted_bytes.items()
    }
    assert more["weights"] == 100 * PAGE_BYTES
    assert more["workspace"] == PAGE_BYTES
