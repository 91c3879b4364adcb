"""Ports for programs that are started in a moment, or that come back to theirs."""

import random
import socket
from collections.abc import Collection, Sequence

from cluster.errors import ClusterError

CHOICE: Sequence[int] = range(20_000, 30_000)
"""Below those that the kernel gives to connections and to whoever asks for any port: nobody takes
one of these between its choice, or the stop of its server, and its use."""


def choose(number: int, taken: Collection[int] = ()) -> list[int]:
    """Different ports of this machine, at random, that nobody listens on.

    Args:
        number: How many, at least one.
        taken: Ports that were promised to others.

    Raises:
        ClusterError: There are not as many.
    """
    found: list[int] = []
    for port in random.sample(CHOICE, len(CHOICE)):
        if port not in taken and _is_free(port):
            found.append(port)
            if len(found) == number:
                return found
    raise ClusterError(
        f"only {len(found)} of {number} ports from {CHOICE[0]} to {CHOICE[-1]} are free"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections that were closed a moment ago are in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
