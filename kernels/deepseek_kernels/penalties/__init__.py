"""Penalties for tokens that were used, biases and bans of end tokens, for some rows of logits."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.penalties import reference
from deepseek_kernels.penalties.reference import IN_PROMPT, IS_END

__all__ = ["IN_PROMPT", "IS_END", "cost", "penalize"]


def penalize(
    logits: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    states: Tensor,
    previous: Tensor,
    is_banning: Tensor,
    num_biases: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    seen: Tensor,
    bias_tokens: Tensor,
    bias_values: Tensor,
) -> Tensor:
    """Count the newest token of some sequences and return their rows of logits, changed.

    What was seen stays on the device, so nobody need know the newest token on the host. The counts
    of a sequence are its state; `reference.py` defines the arithmetic. What the device tensors
    hold is not checked.

    Args:
        logits: `[rows, vocabulary]` fp16, bf16 or fp32, rows at any stride; stays as it is.
        token_ids: `[tokens]` int64.
        rows: `[n]` int64, rows of `logits`.
        states: `[n]` int64, the sequence's row of `seen` and `bias_*`, no number twice; -1 for a
            row that is only copied.
        previous: `[n]` int64, the place in `token_ids` of the token that is to be counted first;
            -1 for none.
        is_banning: `[n]` int64; other than 0, tokens with `IS_END` get minus infinity.
        num_biases: `[n]` int64, how many entries of `bias_*` are used.
        repetition: `[n]` fp32; positive logits of what was seen are divided by it, others
            multiplied.
        frequency: `[n]` fp32, subtracted for each time that a token was generated.
        presence: `[n]` fp32, subtracted once from what was generated.
        seen: `[states, vocabulary]` int32: how often a token was generated, plus `IN_PROMPT` and
            `IS_END` for those that are in the prompt and that end an answer.
        bias_tokens: `[states, biases]` int32, none twice in a row.
        bias_values: `[states, biases]` fp32, added.

    Returns:
        `[n, vocabulary]` in the type of `logits`.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("logits", logits, shape=("rows", "vocabulary"), dtypes=FLOATS)
    int64, int32, float32 = (torch.int64,), (torch.int32,), (torch.float32,)
    check_tensor(
        "token_ids", token_ids, shape=("tokens",), dtypes=int64, like=logits, contiguous=True
    )
    check_tensor("rows", rows, shape=("n",), dtypes=int64, like=logits, contiguous=True)
    for name, tensor, dtypes in (
        ("states", states, int64),
        ("previous", previous, int64),
        ("is_banning", is_banning, int64),
        ("num_biases", num_biases, int64),
        ("repetition", repetition, float32),
        ("frequency", frequency, float32),
        ("presence", presence, float32),
    ):
        check_tensor(name, tensor, shape=rows.shape, dtypes=dtypes, like=logits, contiguous=True)
    shape = ("states", logits.shape[1])
    check_tensor("seen", seen, shape=shape, dtypes=int32, like=logits, contiguous=True)
    num_states = seen.shape[0]
    check_tensor(
        "bias_tokens",
        bias_tokens,
        shape=(num_states, "biases"),
        dtypes=int32,
        like=logits,
        contiguous=True,
    )
    shape_of_values = (num_states, bias_tokens.shape[1])
    check_tensor(
        "bias_values",
        bias_values,
        shape=shape_of_values,
        dtypes=float32,
        like=logits,
        contiguous=True,
    )
    return _penalize(
        logits,
        token_ids,
        rows,
        states,
        previous,
        is_banning,
        num_biases,
        repetition,
        frequency,
        presence,
        seen,
        bias_tokens,
        bias_values,
    )


def cost(logits: Tensor, num_rows: int) -> Cost:
    """Return the work of one call: logits and counts read, logits written."""
    vocabulary = logits.shape[1]
    return Cost(num_rows * vocabulary * (2 * logits.element_size() + 4), 6 * num_rows * vocabulary)


def _fake(logits: Tensor, _token_ids: Tensor, rows: Tensor, *_: object) -> Tensor:
    return torch.empty(rows.shape[0], logits.shape[1], dtype=logits.dtype, device=logits.device)


_penalize = Operation(reference.penalize, fake=_fake, mutates=("seen",))
