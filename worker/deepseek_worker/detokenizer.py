"""From generated tokens to text that may be sent: whole characters, and nothing of a stop string.

Tokens are bytes, and a character may be spread over several of them: bytes are decoded as they
come, and an incomplete character waits for its rest. A suffix that may be the beginning of a
stop string is held back until it is clear that it is none. So the text of a stream, put together,
is the text of the same answer without streaming, wherever the tokens are cut.
"""

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """The text of one answer."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
    ) -> None:
        """Start with no text.

        Args:
            token_bytes: What a token stands for; nothing for one that is not shown.
            stop: The answer ends before the first of these that is complete.
            min_tokens: Stop strings within the first `min_tokens` tokens do not count.
        """
        self.token_bytes = token_bytes
        self._stop = stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self.is_stopped = False
        """Whether a stop string came; what follows it is ignored."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is certain after these tokens."""
        text = ""
        for token_id in token_ids:
            if self.is_stopped:
                break
            self._num_tokens += 1
            text += self._release(self._decode(self.token_bytes(token_id)))
        return text

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.is_stopped:
            return ""
        text = self._release(self._decode(b"", final=True))
        if self.is_stopped:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, new: str) -> str:
        if not self._stop or self._num_tokens < self._min_tokens:
            return new
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            # As if characters came one by one: the stop string that is complete first counts, and
            # of two that end together the longer.
            _, end = min(found)
            self.is_stopped = True
            self._held = ""
            return text[:end]
        kept = max(_num_begun(text, stop) for stop in self._stop)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _num_begun(text: str, stop: str) -> int:
    """The longest end of `text` that is a beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
