"""Copies of KV pages: on the device against the copy ceiling, over the host link against DMA."""

from typing import Literal

import torch
from kernel_bench import Result, Row, Workload

from deepseek_kernels import page_copy as op


def on_device(page_bytes: int) -> Workload:
    pages = 2**28 // page_bytes
    pools = [
        torch.randint(0, 127, (2 * pages, page_bytes), dtype=torch.int8, device="cuda")
        for _ in range(2)
    ]
    ids = [torch.randperm(2 * pages, device="cuda")[:pages].int() for _ in pools]

    def check() -> None:
        gathered = op.gather_pages(pools[0], ids[0])
        torch.testing.assert_close(gathered, pools[0][ids[0].long()], rtol=0, atol=0)

    return Workload(
        candidate=[
            lambda pool=pool, one=one: op.gather_pages(pool, one)
            for pool, one in zip(pools, ids, strict=True)
        ],
        cost=op.cost(pools[0], pages),
        check=check,
        baselines={
            "index_select": [
                lambda pool=pool, one=one: pool.index_select(0, one)
                for pool, one in zip(pools, ids, strict=True)
            ]
        },
    )


def over_host_link(page_bytes: int, direction: Literal["to", "from"]) -> Workload:
    pages = 2**28 // page_bytes
    pool = torch.randint(0, 127, (2 * pages, page_bytes), dtype=torch.int8, device="cuda")
    ids = torch.randperm(2 * pages, device="cuda")[:pages].int()
    host = torch.randint(0, 127, (pages, page_bytes), dtype=torch.int8).pin_memory()
    staging_pages = 2**26 // page_bytes

    def call() -> None:
        if direction == "to":
            op.copy_pages_to_host(pool, ids, host, staging_pages=staging_pages)
        else:
            op.copy_pages_from_host(host, ids, pool, staging_pages=staging_pages)

    def check() -> None:
        call()
        torch.cuda.synchronize()
        torch.testing.assert_close(pool[ids.long()].cpu(), host, rtol=0, atol=0)

    one_way = op.cost(pool, pages)._replace(bytes=pages * page_bytes)
    return Workload(candidate=[call], cost=one_way, check=check, graph=False)


def _of_link(direction: Literal["to", "from"], result: Result) -> float:
    ceilings = result.ceilings
    link = (
        ceilings.device_to_host_gb_per_s if direction == "to" else ceilings.host_to_device_gb_per_s
    )
    return result.gb_per_s / link


ROWS = [
    *(
        Row(
            f"page gather, {name} pages",
            lambda size=size: on_device(size),
            Result.of_copy,
            "of copy",
            0.85,
            0.92,
            "copy_ of 4 GiB",
        )
        for name, size in (("16 KiB", 2**14), ("512 KiB", 2**19))
    ),
    *(
        Row(
            f"pages {direction} the host, 512 KiB pages",
            lambda direction=direction: over_host_link(2**19, direction),
            lambda result, direction=direction: _of_link(direction, result),
            "of pinned copy",
            0.90,
            0.97,
            "copy_ of 256 MiB of pinned memory in the same direction",
        )
        for direction in ("to", "from")
    ),
]
