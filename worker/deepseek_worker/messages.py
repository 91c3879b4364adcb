"""What an API process and the engine's process say to each other.

Over one Unix socket for each API process go frames: four bytes with the length, the lowest first,
and a message in MessagePack, whose fields are known by their place. To the engine: requests,
aborts, grammars to compile, and the question how it is doing. From it: one `Step` for all tokens
of a step, and answers to the questions. No torch.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from deepseek_worker.admission import Limits
from deepseek_worker.progress import Progress
from deepseek_worker.sequence import Output, Request, SamplingParams, Structure
from deepseek_worker.stats import EngineStats

LENGTH_BYTES = 4


class Submit(Struct, tag="submit", array_like=True):
    """Compute the answer to a prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    structure: Structure | None
    adapter: str | None

    @classmethod
    def of(cls, request: Request) -> "Submit":
        """A request without its guide."""
        return cls(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            request.cache_salt,
            request.structure,
            request.adapter,
        )

    def request(self) -> Request:
        """The request that was sent."""
        return Request(
            self.request_id,
            self.prompt_token_ids,
            self.sampling,
            self.cache_salt,
            self.structure,
            self.adapter,
        )


class Abort(Struct, tag="abort", array_like=True):
    """Drop a request; its last output still comes."""

    request_id: str


class Compile(Struct, tag="compile", array_like=True):
    """Say whether a grammar can be followed."""

    number: int
    structure: Structure


class Ask(Struct, tag="ask", array_like=True):
    """Send a `Status` now."""

    number: int


class Facts(Struct, frozen=True, array_like=True):
    """What an API process has to know of a loaded engine."""

    device: str
    vocab_size: int
    limits: Limits
    has_grammars: bool


class Step(Struct, tag="step", array_like=True):
    """What one step produced for this process, in order."""

    outputs: list[Output]


class Compiled(Struct, tag="compiled", array_like=True):
    """The answer to `Compile`."""

    number: int
    error: str | None
    """Why the grammar cannot be followed, for people."""


class Status(Struct, tag="status", array_like=True):
    """How the engine is doing. It comes when asked for, and every second."""

    number: int | None
    """Of the question."""
    progress: Progress
    stats: EngineStats | None
    facts: Facts | None
    """None until the engine is loaded."""


ToEngine = Submit | Abort | Compile | Ask
FromEngine = Step | Compiled | Status

read_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
read_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
_encode = msgspec.msgpack.Encoder().encode


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it goes over the socket."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Frames:
    """Puts messages together again that a socket brings in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes, still encoded."""
        self._data += data
        at = 0
        while len(self._data) >= at + LENGTH_BYTES:
            begin = at + LENGTH_BYTES
            end = begin + int.from_bytes(self._data[at:begin], "little")
            if len(self._data) < end:
                break
            yield bytes(self._data[begin:end])
            at = end
        del self._data[:at]
