"""Whether the worker lives, whether it may get requests, and what it says of itself.

Pure: time is an argument.
"""

from typing import Any

from msgspec import Struct

from deepseek_contract.state import MemoryState, WorkerState
from deepseek_worker.errors import WorkerError
from deepseek_worker.progress import Progress
from deepseek_worker.stats import EngineStats


class Health(Struct):
    """The answer to a probe."""

    ok: bool
    phase: str
    message: str
    loading_progress: float
    seconds_since_step: float
    """Seconds since the engine finished a step, or since it last had nothing to do."""


def liveness(progress: Progress, now: float, stall_seconds: float) -> Health:
    """Not alive is a worker that only a restart can help.

    A load is alive however long it takes: the startup probe, which knows the model, ends it.

    Args:
        progress: The engine's.
        now: Unix seconds.
        stall_seconds: How long a step may take.
    """
    silent = max(0.0, now - progress.last_step_at)
    if progress.phase == "failed":
        return _health(progress, silent, f"The engine ended with an error: {_words(progress)}")
    if progress.phase != "loading" and silent > stall_seconds:
        return _health(
            progress,
            silent,
            f"The engine has work and has finished no step for {silent:.0f} s; "
            f"{stall_seconds:.0f} s are allowed",
        )
    return _health(progress, silent, None)


def readiness(progress: Progress, now: float, stall_seconds: float, *, is_warm: bool) -> Health:
    """Ready is a worker that has answered once and takes more.

    Args:
        progress: The engine's.
        now: Unix seconds.
        stall_seconds: How long a step may take.
        is_warm: Whether the first answer, the worker's own, is complete.
    """
    alive = liveness(progress, now, stall_seconds)
    if not alive.ok:
        return alive
    silent = alive.seconds_since_step
    if progress.phase == "loading":
        share = f"{100 * progress.loading_progress:.0f} %"
        return _health(progress, silent, f"The model is loading: {share}")
    if progress.phase == "draining":
        return _health(progress, silent, "The worker is shutting down")
    if not is_warm:
        return _health(progress, silent, "The model is loaded and answers its first request")
    return alive


def worker_state(
    *,
    served_name: str,
    model_id: str,
    device: str,
    progress: Progress,
    stats: EngineStats | None,
    is_warm: bool,
    now: float,
    stall_seconds: float,
) -> WorkerState:
    """What the operator reads; a worker that is not warm yet is still loading.

    Args:
        served_name: The name that requests ask for.
        model_id: The model that answers.
        device: Where it computes.
        progress: The engine's.
        stats: The engine's; None until it is loaded.
        is_warm: Whether the first answer, the worker's own, is complete.
        now: Unix seconds.
        stall_seconds: How long a step may take.
    """
    reason = message = None
    if progress.phase == "failed":
        reason = progress.failure.reason if progress.failure else WorkerError.reason
        message = _words(progress)
    loading = progress.phase == "ready" and not is_warm
    # The first steps compile; how long they may take is the startup probe's business.
    silent = max(0.0, now - progress.last_step_at) if is_warm else 0.0
    values: dict[str, Any] = {}
    if stats is not None:
        values = {
            "requests_running": stats.num_running,
            "requests_waiting": stats.num_waiting,
            "pool_pages": stats.pool_pages,
            "free_pages": stats.free_pages,
            "cached_pages": stats.cached_pages,
            "page_tokens": stats.page_tokens,
            "used_percent": stats.used_percent,
            "demand_percent": stats.demand_percent,
            "out_of_memory_retries": stats.num_out_of_memory_retries,
            "out_of_memory_failures": stats.num_out_of_memory_failures,
            "is_exhausted": stats.is_exhausted,
        }
    return WorkerState(
        phase="loading" if loading else progress.phase,
        reason=reason,
        message=message,
        served_name=served_name,
        model_id=model_id,
        device=device,
        started_at=progress.started_at,
        last_step_at=progress.last_step_at,
        seconds_since_step=silent,
        is_stalled=progress.phase in ("ready", "draining") and silent > stall_seconds,
        memory=MemoryState(
            predicted_bytes=dict(stats.predicted_bytes) if stats else {},
            measured_bytes=dict(stats.measured_bytes) if stats else {},
            limit_bytes=stats.limit_bytes if stats else 0,
        ),
        loading_progress=progress.loading_progress,
        **values,
    )


def _words(progress: Progress) -> str:
    return progress.failure.message if progress.failure else "it gave no reason"


def _health(progress: Progress, silent: float, trouble: str | None) -> Health:
    return Health(
        ok=trouble is None,
        phase=progress.phase,
        message=trouble or "OK",
        loading_progress=progress.loading_progress,
        seconds_since_step=silent,
    )
