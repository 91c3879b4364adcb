"""What crosses the engine's boundary, and the scheduler's view of one request.

`SamplingParams`, `Request` and `Output` are all that API processes and the engine exchange; what
of them goes from process to process is made for `messages.py`. `Sequence` is the engine's own:
tokens, pages and how far they are computed. No torch here.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGIT_BIASES = 1024
"""Most entries of `SamplingParams.logit_bias`."""

UNKNOWN_TOKEN = -1
"""Stands for a token that the device is choosing and the host has not seen yet."""

NO_ADAPTER = -1
"""The place among the adapters' weights of who uses none."""


class Guide(Protocol):
    """Which tokens may come next in one answer, such as those that keep it valid JSON.

    It has state, belongs to one request, and is used on the engine's thread alone.
    """

    def allowed_tokens(self) -> bytes | None:
        """A bit for each token, `[ceil(vocab / 32)]` int32, lowest bit first; None allows all."""

    def advance(self, token_id: int) -> None:
        """Take note of the token that was chosen."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete, so that no token may follow."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on, for people; None while it can."""


class SamplingParams(Struct, frozen=True, array_like=True):
    """How the tokens of one request are chosen; temperature 0 is greedy and exact."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the `top_k` likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; 0 keeps all."""
    seed: int | None = None
    """Same seed, prompt and parameters: same tokens, whatever else runs beside it."""
    max_tokens: int | None = None
    """Most tokens to generate; None fills the context, 0 only reads the prompt."""
    min_tokens: int = 0
    """End and stop tokens are masked until this many tokens have been generated."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report beside each generated token; 0 reports the token alone."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; it switches the prefix cache off for this request."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and the number added to its logit."""


class Structure(Struct, frozen=True, array_like=True):
    """What an answer has to look like, as text; the engine's process makes a `Guide` of it."""

    lark: str
    """A grammar in llguidance's dialect of Lark."""
    param: str
    """The field that asked for it."""
    begin_after: tuple[str, ...] = ()
    """The grammar begins after these texts, one after the other; until then everything goes."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    structure: Structure | None = None
    """What the answer has to look like; None leaves it free."""
    adapter: str | None = None
    """Name of the LoRA adapter that computes it; None for the model alone."""
    guide: Guide | None = field(default=None, compare=False)
    """Keeps the answer to its structure. It stays in the engine's process, which makes it."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural logarithms of the model's own probabilities, before temperature and masks."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their logprobs, likeliest first."""


class Output(Struct, frozen=True, array_like=True):
    """What one step produced for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """New tokens only; the stop or end token that finished the request is the last of them."""
    finish_reason: FinishReason | None = None
    """None until the request's last output."""
    stop_token_id: int | None = None
    """The end or stop token that finished the request."""
    error: str | None = None
    """For people; set exactly when `finish_reason` is `error`."""
    error_reason: str | None = None
    """The fixed word of the error: `NonFiniteLogits`, `OutOfMemory`, `GuideFailed`, `InternalError`
    or `EngineFailed`; of a request that the engine's process refused, the refusal's `reason`."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids` when asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each prompt token, None for the first; comes once, with the prompt's last chunk."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    Of `tokens`, the KV of `[0, num_computed_tokens)` is in `pages`, or will be once the steps
    that run have ended. The last of `tokens` is `UNKNOWN_TOKEN` while the step that chooses it
    runs. A sequence that has one token left to compute decodes; one with more prefills.
    Preemption sets `num_computed_tokens` back to 0 and keeps `tokens`, so that generated ones
    are prefilled.
    """

    request: Request
    order: int
    """Counts up with every request the engine takes; the oldest has the lowest."""
    max_total_tokens: int
    """Prompt plus the most tokens that may be generated."""
    stop_token_ids: frozenset[int]
    adapter: int = NO_ADAPTER
    """Place of its LoRA adapter among the weights."""
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    """A number below the most running requests, the sequence's own while it runs."""
    page_digests: list[bytes] = field(default_factory=list)
    """Chained digests of the first full pages of `tokens`, computed as needed."""
    num_computed_tokens: int = 0
    num_registered_pages: int = 0
    """How many of `pages` have been offered to the prefix cache."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    num_preemptions: int = 0
    num_times_passed: int = 0
    """How often a later request was admitted while this one waited for pages."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's second token and those after it, as far as they are known."""

    def __post_init__(self) -> None:
        """Start from the prompt."""
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the client sent."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens the model chose so far."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not in the pages yet."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_computed(self) -> bool:
        """Whether no further step is needed: the last token is chosen, or none was asked for."""
        num_needed = max(self.num_prompt_tokens, self.max_total_tokens - 1)
        return self.num_computed_tokens >= num_needed

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are asked for, and not all of them are known."""
        is_asked = self.request.sampling.prompt_logprobs is not None
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def needs_known_tokens(self) -> bool:
        """Whether its next token depends on the ids of all before, by way of the host."""
        return self.request.guide is not None

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes exactly its newest token."""
        return self.num_uncomputed_tokens == 1 and self.num_generated_tokens > 0
