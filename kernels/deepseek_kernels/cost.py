"""What a kernel must move and compute: the numerators of every roofline figure."""

from typing import NamedTuple


class Cost(NamedTuple):
    """The least work of one call: each input read once, each output written once."""

    bytes: int
    flops: int
