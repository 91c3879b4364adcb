"""The tensor behind the page pool.

One page holds its tokens' keys and values of all layers in one stretch of memory,
`[layers, page_tokens, 2, kv_heads, head_dim]`, so that a page moves between devices as one
copy. Within a layer a token's key and value lie side by side: one write stores both.
"""

import torch
from torch import Tensor

from deepseek_worker.models.config import ModelConfig


class KvPool:
    """`num_pages` pages of unknown content."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = config.num_layers
        self.page_tokens = page_tokens
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.data = torch.empty(
            (num_pages, config.num_layers, page_tokens, 2, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            device=device,
        )
        self.rows = self.data.view(-1, 2 * config.num_kv_heads * config.head_dim)
        """`[pages * layers * page_tokens, key and value]`, one row for each token and layer."""
        self.layer_pages = self.data.view(-1, page_tokens, 2, config.num_kv_heads, config.head_dim)
        """`[pages * layers, page_tokens, 2, kv_heads, head_dim]`."""

    def clear(self, pages: list[int]) -> None:
        """Overwrite what earlier sequences left."""
        self.data[pages] = 0

    def layer_rows(self, slots: Tensor) -> tuple[Tensor, ...]:
        """For every layer, the rows of tokens whose slots (page * page_tokens + offset) are given.

        Row of layer `l`: `(page * num_layers + l) * page_tokens + offset`.
        """
        page, offset = slots // self.page_tokens, slots % self.page_tokens
        base = page * (self.num_layers * self.page_tokens) + offset
        layers = torch.arange(self.num_layers, device=slots.device)[:, None] * self.page_tokens
        return (base + layers).unbind(0)

    def layer_page_indices(self, pages: Tensor) -> tuple[Tensor, ...]:
        """For every layer, the indices of these pages in `layer_pages`."""
        layers = torch.arange(self.num_layers, device=pages.device)[:, None]
        return (pages * self.num_layers + layers).unbind(0)
