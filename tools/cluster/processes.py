"""Processes that outlive the command that started them, and that are only ever ended by identity.

A process is known by its id, its start time and its arguments together, so a process id that
the kernel has given to somebody else is never touched. Each one carries the cluster's folder in
its environment: what a crashed command started but did not record is found by that.
"""

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster import files
from cluster.errors import ClusterError

MARKER = "DEEPSEEK_CLUSTER_STATE"
"""Environment variable of every process of a cluster; its value is the cluster's folder."""
_DYING_WITH_PARENT = ("/usr/bin/setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True)
class Process:
    """A started process, told apart from a later one with the same id."""

    name: str
    pid: int
    start_ticks: int
    argv: tuple[str, ...]

    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not, and is buried if it is ours."""
        identity = _identity(self.pid)
        if identity is not None:
            # An ending process has lost its arguments before it is gone.
            return identity in {(self.start_ticks, self.argv), (self.start_ticks, ("",))}
        try:
            # Nothing to bury yet: threads of the ended process are still on their way out.
            return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        except ChildProcessError:
            return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this very process, or do nothing when it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # Checked after opening: the handle keeps pointing at the process that was checked.
            if self.is_alive():
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)


def start(
    name: str,
    argv: Sequence[str | Path],
    state: Path,
    *,
    environment: Mapping[str, str] | None = None,
    dies_with_parent: bool = False,
) -> Process:
    """Start a process in a session of its own, its output in `logs/NAME.log`, and record it.

    Args:
        name: file name of its log and its record.
        argv: the program, with its path, and its arguments.
        state: the cluster's folder.
        environment: variables beside the inherited ones.
        dies_with_parent: end it when the starting thread ends, however that happens.
    """
    words = [*(_DYING_WITH_PARENT if dies_with_parent else ()), *(str(word) for word in argv)]
    logs, records = state / "logs", state / "processes"
    logs.mkdir(parents=True, exist_ok=True)
    records.mkdir(parents=True, exist_ok=True)
    log = os.open(logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    # Root folders of containers get their permissions from it, and other users must pass them.
    umask = os.umask(0o022)
    try:
        pid = os.posix_spawn(
            words[0],
            words,
            {**os.environ, **(environment or {}), MARKER: str(state)},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )
    finally:
        os.umask(umask)
        os.close(log)
    ticks, arguments = _settled_identity(pid, tuple(words) if dies_with_parent else ())
    process = Process(name, pid, ticks, arguments)
    files.write(records / f"{name}.json", json.dumps(asdict(process)))
    return process


def owner() -> str:
    """This process as a word that no other one has had since the machine started: PID-TICKS."""
    identity = _identity(os.getpid())
    if identity is None:
        raise ClusterError("/proc does not show this process")
    return f"{os.getpid()}-{identity[0]}"


def is_owner_alive(word: str) -> bool:
    """Whether the process that `owner` named so still runs."""
    pid, ticks = map(int, word.split("-"))
    identity = _identity(pid)
    return identity is not None and identity[0] == ticks


def recorded(state: Path) -> list[Process]:
    """The processes that the cluster's folder knows of, alive or not."""
    found = []
    for record in sorted((state / "processes").glob("*.json")):
        # Cut off by a crash of the machine, or removed meanwhile by whoever ends the cluster.
        with suppress(ValueError, TypeError, KeyError, FileNotFoundError):
            fields = json.loads(record.read_text(encoding="utf-8"))
            found.append(Process(**{**fields, "argv": tuple(fields["argv"])}))
    return found


def marked(state: Path) -> list[Process]:
    """Living processes that carry the cluster's folder in their environment."""
    mark = f"{MARKER}={state}".encode()
    found = []
    for pid in _pids():
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            process = at(pid)
            if mark in environment and process is not None:
                found.append(process)
    return found


def at(pid: int) -> Process | None:
    """The living process with this id, or None."""
    identity = _identity(pid)
    return None if identity is None else Process(f"pid-{pid}", pid, *identity)


def stop(processes: Iterable[Process], grace_seconds: float = 5.0) -> None:
    """Ask the processes to end, and after `grace_seconds` make them."""
    waiting = [process for process in processes if process.is_alive()]
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 60.0)):
        for process in waiting:
            process.send(number)
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            waiting = [process for process in waiting if process.is_alive()]
            if waiting:
                time.sleep(0.02)


def _pids() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            yield int(entry)


def _identity(pid: int) -> tuple[int, tuple[str, ...]] | None:
    """Start time in clock ticks since boot and arguments, or None for a dead process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    # The command name, in brackets, may hold spaces and brackets itself.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in {"Z", "X"}:
        return None
    words = command.rstrip(b"\0").split(b"\0")
    return int(fields[19]), tuple(word.decode(errors="replace") for word in words)


def _settled_identity(pid: int, wrapper: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """The identity once the wrapper has become the program; the last one seen if it ends before."""
    last: tuple[int, tuple[str, ...]] = (0, ())
    while (identity := _identity(pid)) is not None:
        last = identity
        # While one becomes another program, it has no arguments.
        if identity[1] not in {wrapper, ("",)}:
            break
        time.sleep(0.005)
    return last
