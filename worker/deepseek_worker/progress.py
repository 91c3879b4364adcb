"""How the engine is doing, as the rest of the worker hears of it. No torch."""

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from deepseek_worker.errors import WorkerError

Phase = Literal["loading", "ready", "draining", "failed"]


class Failure(Struct, frozen=True, array_like=True):
    """What ended an engine or a process, fit to be told to another process."""

    reason: str
    """A fixed word; see `errors.py`."""
    message: str
    exit_code: int = WorkerError.exit_code

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The same error in words."""
        if isinstance(error, WorkerError):
            return cls(error.reason, str(error), error.exit_code)
        return cls(WorkerError.reason, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Progress:
    """How the engine is doing; readable at any time without waiting for a step."""

    phase: Phase
    loading_progress: float
    """0 to 1."""
    started_at: float
    """Unix seconds."""
    last_step_at: float
    """Unix seconds of the last finished step, or of the last moment without work."""
    failure: Failure | None = None
    """What ended the engine, in phase `failed`."""
