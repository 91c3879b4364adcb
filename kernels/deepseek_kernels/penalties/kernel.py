"""One program changes one block of one row, and counts the row's newest token if it is in there.

So each count has one writer, and a block is read and written once. Biases of the block's tokens
are applied by computing those few logits again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels.penalties.reference import COUNT, IN_PROMPT, IS_END

_COUNT = tl.constexpr(COUNT)
_SEEN = tl.constexpr(COUNT | IN_PROMPT)
_IS_END = tl.constexpr(IS_END)

BLOCK = 2048
BIASES = 128
"""Biases that a program looks at at a time."""


@triton.jit
def _penalized(b_logits, b_seen, b_repetition, b_inverse, b_frequency, b_presence):
    b_counts = b_seen & _COUNT
    b_scaled = b_logits * tl.where(b_logits > 0, b_inverse, b_repetition)
    b_values = tl.where((b_seen & _SEEN) != 0, b_scaled, b_logits)
    b_lost = b_counts.to(tl.float32) * b_frequency + b_presence
    return tl.where(b_counts > 0, b_values - b_lost, b_values)


@triton.jit
def penalties_kernel(
    logits_ptr,
    token_ids_ptr,
    rows_ptr,
    states_ptr,
    previous_ptr,
    is_banning_ptr,
    num_biases_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    seen_ptr,
    bias_tokens_ptr,
    bias_values_ptr,
    out_ptr,
    vocabulary,
    stride_logits,
    biases_per_state,
    BLOCK: tl.constexpr,
    BIASES: tl.constexpr,
):
    i_out = tl.program_id(0).to(tl.int64)
    i_first = tl.program_id(1) * BLOCK
    o_tokens = i_first + tl.arange(0, BLOCK)
    m_tokens = o_tokens < vocabulary
    i_row = tl.load(rows_ptr + i_out)
    i_state = tl.load(states_ptr + i_out)
    num_biases = tl.load(num_biases_ptr + i_out)
    b_repetition = tl.load(repetition_ptr + i_out)
    b_frequency = tl.load(frequency_ptr + i_out)
    b_presence = tl.load(presence_ptr + i_out)
    is_banning = tl.load(is_banning_ptr + i_out) != 0
    i_previous = tl.load(previous_ptr + i_out)
    p_row = logits_ptr + i_row * stride_logits
    p_out = out_ptr + i_out * vocabulary
    b_logits = tl.load(p_row + o_tokens, mask=m_tokens, other=0.0).to(tl.float32)
    if i_state < 0:
        tl.store(p_out + o_tokens, b_logits.to(out_ptr.dtype.element_ty), mask=m_tokens)
    else:
        # All that the row's state leads to is on its way before any of it is used.
        p_seen = seen_ptr + i_state * vocabulary
        b_seen = tl.load(p_seen + o_tokens, mask=m_tokens, other=0)
        i_newest = tl.load(token_ids_ptr + i_previous, mask=i_previous >= 0, other=-1)
        o_biases = tl.arange(0, BIASES)
        p_biased = bias_tokens_ptr + i_state * biases_per_state + o_biases
        o_biased = tl.load(p_biased, mask=o_biases < biases_per_state, other=-1)

        b_inverse = tl.div_rn(1.0, b_repetition)
        m_newest = m_tokens & (o_tokens == i_newest)
        b_seen += m_newest.to(tl.int32)
        tl.store(p_seen + o_tokens, b_seen, mask=m_newest)
        b_values = _penalized(b_logits, b_seen, b_repetition, b_inverse, b_frequency, b_presence)
        b_values = tl.where(is_banning & ((b_seen & _IS_END) != 0), float("-inf"), b_values)
        tl.store(p_out + o_tokens, b_values.to(out_ptr.dtype.element_ty), mask=m_tokens)

        if num_biases > 0:
            # Threads read counts, and write logits, that others of this program have written.
            tl.debug_barrier()
            for i_bias in range(0, num_biases, BIASES):
                m_biased = (o_biased >= i_first) & (o_biased < i_first + BLOCK)
                m_biased &= i_bias + o_biases < num_biases
                p_value = bias_values_ptr + i_state * biases_per_state + i_bias + o_biases
                b_bias = tl.load(p_value, mask=m_biased, other=0.0)
                b_logit = tl.load(p_row + o_biased, mask=m_biased, other=0.0).to(tl.float32)
                b_count = tl.load(p_seen + o_biased, mask=m_biased, other=0)
                b_value = _penalized(
                    b_logit, b_count, b_repetition, b_inverse, b_frequency, b_presence
                )
                b_value += b_bias
                b_value = tl.where(is_banning & ((b_count & _IS_END) != 0), float("-inf"), b_value)
                tl.store(p_out + o_biased, b_value.to(out_ptr.dtype.element_ty), mask=m_biased)
                i_next = i_bias + BIASES
                m_next = i_next + o_biases < num_biases
                o_biased = tl.load(p_biased + i_next, mask=m_next, other=-1)


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
    """Launch the kernel for `reference.penalize`."""
    vocabulary = logits.shape[1]
    out = torch.empty(rows.shape[0], vocabulary, dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    # No fused multiply-add: a biased logit is computed as it was without.
    penalties_kernel[(rows.shape[0], triton.cdiv(vocabulary, BLOCK))](
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
        out,
        vocabulary,
        logits.stride(0),
        bias_tokens.shape[1],
        BLOCK=BLOCK,
        BIASES=BIASES,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
