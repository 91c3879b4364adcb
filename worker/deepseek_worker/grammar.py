"""Keeps answers within a grammar: compiles it, and tells for each step which tokens may come.

The work is llguidance's, a library in Rust that follows JSON schemas, regular expressions and
Lark grammars by Earley's algorithm over the tokenizer's own tokens. Compiling may take a second:
`switchboard.py` has threads for it. On the engine's, a step costs far below a millisecond.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from deepseek_worker.errors import InvalidRequest
from deepseek_worker.markers import MarkerSearch
from deepseek_worker.sequence import Structure
from deepseek_worker.tokenizer import Tokenizer

# The library's own bounds: tens of milliseconds to build, a few for a step, 100 MB of states.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
MAX_CACHED = 64
# They do not bound nested repetitions such as (a{1000}){1000}, so each step is timed as well, by
# the processor's clock: everybody's answers wait for it.
MAX_STEP_SECONDS = 0.25

logger = logging.getLogger(__name__)


class GrammarGuide:
    """Follows one answer through its grammar; see `sequence.Guide`."""

    def __init__(
        self,
        matcher: LLMatcher,
        search: MarkerSearch,
        token_bytes: Callable[[int], bytes],
        mask_bytes: int,
    ) -> None:
        self._matcher = matcher
        self._search = search
        self._token_bytes = token_bytes
        self._mask_bytes = mask_bytes
        self._slowest_seconds = 0.0

    def allowed_tokens(self) -> bytes | None:
        """A bit for each token, `[ceil(vocab / 32)]` int32, lowest bit first; None allows all."""
        if not self._search.is_done:
            return None
        begun = time.thread_time()
        bits = self._matcher.compute_bitmask()[: self._mask_bytes]
        self._slowest_seconds = max(self._slowest_seconds, time.thread_time() - begun)
        return bits

    def advance(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        if self._search.is_done:
            self._matcher.consume_token(token_id)
        else:
            self._search.push(self._token_bytes(token_id))

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete, so that no token may follow."""
        matcher = self._matcher
        return self._search.is_done and matcher.is_stopped() and not matcher.is_error()

    @property
    def is_slow(self) -> bool:
        """Whether a step took longer than others can be made to wait."""
        return self._slowest_seconds > MAX_STEP_SECONDS

    @property
    def error(self) -> str | None:
        """Why it cannot go on, for people; None while it can."""
        if self._matcher.is_error():
            return f"the answer left its grammar: {_shortened(self._matcher.get_error())}"
        if self.is_slow:
            return f"one token took {self._slowest_seconds:.2f} s; simplify the grammar"
        return None


class GrammarCompiler:
    """Makes guides for one model's tokens; may be called from several threads.

    Args:
        tokenizer: The model's.
        vocab_size: Rows of the model's output, which may be more than the tokenizer knows.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._mask_bytes = 4 * -(-vocab_size // 32)
        ends = [token for token in tokenizer.eos_token_ids if token < vocab_size]
        self._tokens = LLTokenizer(_wrapped(tokenizer, vocab_size), eos_token=ends or None)
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, LLMatcher | str] = OrderedDict()
        """Grammars, and what is wrong with those that are none."""

    def compile(self, structure: Structure) -> Callable[[], GrammarGuide]:
        """Read a grammar; what is returned makes a guide for each answer.

        Raises:
            InvalidRequest: it is no grammar, too large, or nothing can satisfy it.
        """
        known = self._known(structure.lark)
        if isinstance(known, str):
            raise InvalidRequest(
                f"Invalid '{structure.param}': no grammar can be made of it: {known}.",
                structure.param,
                "invalid_value",
            )
        matcher = known

        def guide() -> GrammarGuide:
            search = MarkerSearch(structure.begin_after)
            return GrammarGuide(matcher.deep_copy(), search, self._token_bytes, self._mask_bytes)

        return guide

    def _known(self, lark: str) -> LLMatcher | str:
        with self._lock:
            if known := self._cache.get(lark):
                self._cache.move_to_end(lark)
                return known
        compiled = self._compiled(lark)
        with self._lock:
            self._cache[lark] = compiled
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _compiled(self, lark: str) -> LLMatcher | str:
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            return _shortened(matcher.get_error())
        first = GrammarGuide(
            matcher.deep_copy(), MarkerSearch(()), self._token_bytes, self._mask_bytes
        )
        is_possible = any(first.allowed_tokens() or b"")
        if first.is_slow:
            return first.error or ""
        return matcher if is_possible and first.error is None else "nothing can satisfy it"


def _wrapped(tokenizer: Tokenizer, vocab_size: int) -> TokenizerWrapper:
    """The tokenizer in the form that llguidance asks for."""
    ends = sorted(token for token in tokenizer.eos_token_ids if token < vocab_size)
    # A model without an end token still needs one here; its grammars end by themselves.
    end = ends[0] if ends else vocab_size
    texts = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    markers = sorted({*(t for t in tokenizer.marker_token_ids if t < vocab_size), *ends, end})

    class Source:
        eos_token_id = end
        bos_token_id = None
        tokens = (*texts, *(() if ends else (b"<end of the grammar>",)))
        special_token_ids = tuple(markers)

        def __call__(self, text: bytes | str) -> list[int]:
            text = text.decode(errors="replace") if isinstance(text, bytes) else text
            return tokenizer.encode(text, add_special_tokens=False)

    return TokenizerWrapper(Source())


def _shortened(message: str) -> str:
    """The library's words on one line; it quotes whole grammars."""
    line = " ".join(message.split())
    return line if len(line) <= 300 else f"{line[:300]}…"
