"""Penalties, biases and bans, the specification of the kernel.

For each row, first its previous token is counted in `seen`. Then, in fp32 and in this order: logits
of tokens that were seen, generated or in the prompt, are divided by the repetition penalty where
they are positive and multiplied by it where not; those of generated tokens lose the frequency
penalty times their count, plus the presence penalty; biases are added; end tokens of rows that ban
them get minus infinity. What was seen is one integer a token: a count and two flags.
"""

import torch
from torch import Tensor

IN_PROMPT = 1 << 30
"""Flag of tokens that are in the prompt."""
IS_END = 1 << 29
"""Flag of tokens that end an answer."""
COUNT = IS_END - 1
"""The bits of how often a token was generated."""


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
    """Return the changed rows, `[n, vocabulary]` in the type of `logits`."""
    has_state = states >= 0
    is_counted = has_state & (previous >= 0)
    newest = token_ids.index_select(0, previous[is_counted])
    seen[states[is_counted], newest] += 1

    values = logits.index_select(0, rows).float()
    # Without states there is no row to take for those that have none.
    own = seen.new_zeros(len(rows), logits.shape[1])
    own[has_state] = seen[states[has_state]]
    counts = own & COUNT
    penalty = repetition[:, None]
    scaled = torch.where(values > 0, values / penalty, values * penalty)
    values = torch.where((own & (COUNT | IN_PROMPT)) != 0, scaled, values)
    lost = counts * frequency[:, None] + presence[:, None]
    values = torch.where(counts > 0, values - lost, values)
    for row, (state, number) in enumerate(zip(states.tolist(), num_biases.tolist(), strict=True)):
        if state >= 0:
            values[row, bias_tokens[state, :number].long()] += bias_values[state, :number]
    is_banned = ((own & IS_END) != 0) & (is_banning[:, None] != 0)
    return values.masked_fill_(is_banned, -torch.inf).to(logits.dtype)
