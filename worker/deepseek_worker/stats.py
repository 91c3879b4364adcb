"""Where an engine stands after a step: what metrics and `GET /state` are made of. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts and bytes after a step."""

    num_running: int
    num_waiting: int
    pool_pages: int
    free_pages: int
    """Pages without content."""
    cached_pages: int
    """Pages that nobody holds and a later prompt may find."""
    held_pages: int
    waiting_pages: int
    """Pages that waiting requests need for the tokens they have now."""
    page_tokens: int
    predicted_bytes: Mapping[str, int]
    measured_bytes: Mapping[str, int]
    page_bytes: int
    limit_bytes: int
    num_steps: int
    num_preemptions: int
    num_out_of_memory_retries: int
    num_out_of_memory_failures: int
    """Requests that memory did not suffice for even alone."""
    is_exhausted: bool
    """Whether the last such requests failed one after another: retrying is used up."""
    num_non_finite_logits: int
    num_prompt_tokens: int
    """Of admitted requests, cached ones included."""
    num_generated_tokens: int
    num_cached_tokens: int

    @property
    def used_percent(self) -> float:
        """Weights, workspace, context and held pages over the limit."""
        others = sum(size for kind, size in self.measured_bytes.items() if kind != "kv_cache")
        return 100 * (others + self.held_pages * self.page_bytes) / self.limit_bytes

    @property
    def demand_percent(self) -> float:
        """Pages that requests hold or wait for over the pool; may exceed 100."""
        return 100 * (self.held_pages + self.waiting_pages) / self.pool_pages
