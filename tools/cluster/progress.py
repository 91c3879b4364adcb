"""Progress for people: one line a phase with its seconds, and a sign of life in long ones."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

HEARTBEAT_SECONDS = 15.0


@contextmanager
def phase(title: str) -> Iterator[None]:
    """Print `title` with its duration when the block ends; every 15 s until then say so too."""
    start = time.monotonic()
    done = threading.Event()

    def heartbeat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"  ... {title} ({time.monotonic() - start:.0f} s so far)")

    beat = threading.Thread(target=heartbeat, daemon=True)
    beat.start()
    try:
        yield
    except BaseException:
        say(f"  failed after {time.monotonic() - start:.1f} s: {title}")
        raise
    else:
        say(f"{time.monotonic() - start:7.1f} s  {title}")
    finally:
        done.set()
        beat.join()


def say(line: str) -> None:
    """Print a line to standard error at once, so that standard output stays for results."""
    print(line, file=sys.stderr, flush=True)
