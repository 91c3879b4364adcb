"""Counters of arrivals, by which the last of the programs that share a result knows itself."""

import torch
from torch import Tensor

_COUNTERS = 2**18
_counters: dict[torch.device, Tensor] = {}
_next_counter = 0


def counters(device: torch.device, count: int) -> Tensor:
    """Return `count` int32 zeros for kernels that leave them zero.

    Calls take turns through one buffer of the device, so that launches that run at the same
    time, on other streams or from other graphs, count in different places.
    """
    global _next_counter  # noqa: PLW0603
    buffer = _counters.get(device)
    if buffer is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first call of a process that splits work ran inside a graph capture; "
                "run one before"
            )
        buffer = _counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    if _next_counter + count > _COUNTERS:
        _next_counter = 0
    start = _next_counter
    _next_counter += -(-count // 32) * 32
    return buffer[start : start + count]
