"""The bytes behind the page pool.

One page holds its tokens' keys and values of all layers in one stretch of memory, so that it
moves between devices as one copy. Within a page every layer has its own stretch,
`[page_tokens, 2, kv_heads, head_dim]`, in its own precision: a token's key and value lie side by
side, and one write stores both. With int8 the scales follow, `[page_tokens, 2, kv_heads]`
float32, one for each head of each token; with fp8 there is one for each head of the layer, which
no page holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deepseek_contract.sizing import KvFormat, kv_layer_bytes
from deepseek_kernels import quantize
from deepseek_worker.memory.ledger import shape_of
from deepseek_worker.models.config import ModelConfig

KV_TYPES: dict[KvFormat, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
FP8_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's part of all pages: views, strided over the pages."""

    keys: Tensor
    """`[pages, page_tokens, kv_heads, head_dim]`."""
    values: Tensor
    key_scale: Tensor | None
    """float32: int8 `[pages, page_tokens, kv_heads]`, fp8 `[kv_heads]`; `value = code * scale`."""
    value_scale: Tensor | None
    pages: Tensor
    """Keys and values, `[pages, page_tokens, 2, kv_heads, head_dim]`."""
    scales: Tensor | None
    """Of keys and values: int8 `[pages, page_tokens, 2, kv_heads]`, fp8 `[2, kv_heads]`."""

    def write(self, page: Tensor, offset: Tensor, keys_values: Tensor) -> None:
        """Store `[tokens, 2, kv_heads, head_dim]` at these places, rounded to the format."""
        if self.pages.dtype == torch.int8 and self.scales is not None:
            heads = keys_values.reshape(-1, keys_values.shape[-1])
            codes, scale = quantize(heads, dtype=torch.int8)
            self.pages[page, offset] = codes.view(keys_values.shape)
            self.scales[page, offset] = scale.view(keys_values.shape[:-1])
        elif self.pages.dtype == torch.float8_e4m3fn and self.scales is not None:
            scaled = keys_values.float() / self.scales[:, :, None]
            codes = scaled.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
            # Indexed writes do not know fp8; its bytes do.
            self.pages.view(torch.uint8)[page, offset] = codes.view(torch.uint8)
        else:
            self.pages[page, offset] = keys_values.to(self.pages.dtype)

    def read(self, pages: Tensor, dtype: torch.dtype, workspace: Tensor | None = None) -> Tensor:
        """Gather pages, `[len(pages), page_tokens, 2, kv_heads, head_dim]` in `dtype`.

        Args:
            pages: Indices of pages, int64.
            dtype: Of the result.
            workspace: Where to gather, at least as large; uint8. The result may be a view of it.
        """
        codes = self._gather(pages, workspace)
        if self.scales is None:
            return codes.to(dtype)
        scale = self.scales.index_select(0, pages) if self.scales.dim() > 2 else self.scales
        return (codes.to(torch.float32) * scale[..., None]).to(dtype)

    def _gather(self, pages: Tensor, workspace: Tensor | None) -> Tensor:
        kind = self.pages.dtype
        source = self.pages.view(torch.uint8) if kind == torch.float8_e4m3fn else self.pages
        out = None
        if workspace is not None:
            num_bytes = len(pages) * self.pages[0].nbytes
            out = workspace[:num_bytes].view(source.dtype).view(len(pages), *source.shape[1:])
        gathered = torch.index_select(source, 0, pages, out=out)
        return gathered.view(kind)


class KvPool:
    """`num_pages` pages of unknown content."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_tokens: int,
        formats: Sequence[KvFormat],
        device: torch.device,
    ) -> None:
        """Allocate; `formats` has one entry for each layer."""
        self.page_tokens = page_tokens
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.formats = tuple(formats)
        shape = shape_of(config)
        sizes = [kv_layer_bytes(shape, kind, page_tokens) for kind in self.formats]
        self.data = torch.empty((num_pages, sum(sizes)), dtype=torch.uint8, device=device)
        """`[pages, bytes of a page]`."""
        self.layers = tuple(
            self._layer(self.data[:, end - size : end], kind)
            for size, end, kind in zip(sizes, accumulate(sizes), self.formats, strict=True)
        )
        self.largest_layer_bytes = max(sizes)
        """Bytes of one layer in one page, at most."""

    def clear(self, pages: list[int]) -> None:
        """Overwrite what earlier sequences left."""
        self.data[pages] = 0

    def _layer(self, stretch: Tensor, kind: KvFormat) -> KvLayer:
        dtype = KV_TYPES[kind]
        places = (len(stretch), self.page_tokens, 2, self.kv_heads)
        num_codes = self.page_tokens * 2 * self.kv_heads * self.head_dim
        num_bytes = num_codes * dtype.itemsize
        pages = stretch[:, :num_bytes].view(dtype).view(*places, self.head_dim)
        scales = key_scale = value_scale = None
        if kind == "int8":
            num_scales = self.page_tokens * 2 * self.kv_heads
            scale_bytes = stretch[:, num_bytes : num_bytes + 4 * num_scales]
            scales = scale_bytes.view(torch.float32).view(places)
            key_scale, value_scale = scales.unbind(2)
        elif kind == "fp8":
            scales = torch.ones(2, self.kv_heads, device=stretch.device)
            key_scale, value_scale = scales.unbind(0)
        keys, values = pages.unbind(2)
        return KvLayer(keys, values, key_scale, value_scale, pages, scales)
