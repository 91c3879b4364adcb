"""Text to token ids and back, and chat messages to a prompt, from the model's own files.

API processes read and write text with it, the engine's process makes grammars of its tokens.
Nothing here needs torch. A folder brings tokenizer.json; a GGUF file brings vocabulary, merges and
the name of its pre-tokenizer, from which the same tokenizer is built.
"""

import datetime
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from deepseek_worker.errors import BrokenCheckpoint, ModelNotFound, TemplateError, UnsupportedModel
from deepseek_worker.weights.files import find_model
from deepseek_worker.weights.gguf_file import GgufFile, open_gguf

# The library reads it with every batch; ours have one text each, which more threads cannot share.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# llama.cpp's kinds of tokens.
CONTROL, USER_DEFINED = 3, 4

_LETTERS_AND_REST = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """One model's vocabulary and chat template."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        bos_token: str | None,
        eos_token: str | None,
        eos_token_ids: frozenset[int],
        adds_bos: bool,
        chat_template: str | None,
    ) -> None:
        self._fast = fast
        self._bos_token = bos_token
        self._eos_token = eos_token
        self._bos_id = fast.token_to_id(bos_token) if adds_bos and bos_token else None
        self.eos_token_ids = eos_token_ids
        self.vocab_size = fast.get_vocab_size(with_added_tokens=True)
        self._added = fast.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            token_id for token_id, token in self._added.items() if token.special
        )
        # Some models mark turns, thoughts and tool calls by tokens that are not called special.
        self.marker_token_ids = self.special_token_ids | {
            token_id
            for token_id, token in self._added.items()
            if token.content.startswith("<") and token.content.endswith(">")
        }
        self._is_byte_level = "ByteLevel" in json.dumps(json.loads(fast.to_str())["decoder"])
        self.chat_template = chat_template or ""
        """Its text; empty where there is none."""
        self._template: jinja2.Template | None = None
        self._template_error: str | None = None
        if chat_template is not None:
            try:
                self._template = _environment().from_string(chat_template)
            except jinja2.TemplateError as error:
                self._template_error = f"the model's chat template is broken: {error}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the begin token where the model wants one."""
        # Of the library's ways to do it, those for batches alone let other threads run meanwhile.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that no token has, such as padded rows, are empty."""
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for ids that no token has."""
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_of_character()
        if self._is_byte_level and all(character in table for character in token):
            return bytes(table[character] for character in token)
        if len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation; encode it with `add_special_tokens=False`.

        Raises:
            TemplateError: there is no template, it is broken, or it refuses these messages.
        """
        if self._template is None:
            raise TemplateError(
                self._template_error
                or "this model has no chat template; use /v1/completions with a plain prompt"
            )
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_token or "",
                eos_token=self._eos_token or "",
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, OverflowError) as error:
            raise TemplateError(
                f"the model's chat template refuses these messages: {error}"
            ) from error


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of the model at `path`, which is what `EngineConfig.model` is.

    Raises:
        ModelNotFound: the model or its tokenizer is missing.
        BrokenCheckpoint: a file is not readable.
        UnsupportedModel: a GGUF file names a tokenizer that is not known here.
    """
    found = find_model(path)
    return _from_gguf(open_gguf(found)) if found.is_file() else _from_folder(found)


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} holds no tokenizer.json; slow tokenizers are not served")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:
        raise BrokenCheckpoint(f"{path} is not a readable tokenizer: {error}") from error
    config = _json(folder / "tokenizer_config.json")
    model = _json(folder / "config.json") | _json(folder / "generation_config.json")
    bos_token, eos_token = _text_of(config.get("bos_token")), _text_of(config.get("eos_token"))
    end = model.get("eos_token_id")
    if end is None and eos_token is not None:
        end = fast.token_to_id(eos_token)
    return Tokenizer(
        fast,
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=frozenset([end] if isinstance(end, int) else end or ()),
        adds_bos=bool(config.get("add_bos_token", False)),
        chat_template=_chat_template(folder, config),
    )


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BrokenCheckpoint(f"{path} is not readable JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _text_of(token: Any) -> str | None:
    """Special tokens are strings, or objects with the string in `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _from_gguf(file: GgufFile) -> Tokenizer:
    kind = file.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"{file.path}: tokenizer {kind!r} is not served in GGUF files; only 'gpt2', which is "
            "byte-level BPE, is"
        )
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{file.path}: pre-tokenizer {name!r} is not known; known are "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata["tokenizer.ggml.merges"]]
    is_llama3 = name == "llama-bpe"
    fast = FastTokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=is_llama3,
        )
    )
    fast.pre_tokenizer = PRE_TOKENIZERS[name]()
    fast.decoder = decoders.ByteLevel()
    if name in ("qwen2", "deepseek-r1-qwen"):
        fast.normalizer = normalizers.NFC()
    kinds: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    fast.add_special_tokens(_added(tokens, kinds, CONTROL, special=True))
    fast.add_tokens(_added(tokens, kinds, USER_DEFINED, special=False))

    def token(role: str) -> str | None:
        token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if token_id is None else tokens[token_id]

    ends = (file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    return Tokenizer(
        fast,
        bos_token=token("bos"),
        eos_token=token("eos"),
        eos_token_ids=frozenset(end for end in ends if end is not None),
        adds_bos=file.metadata.get("tokenizer.ggml.add_bos_token", is_llama3),
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )


def _added(tokens: list[str], kinds: list[int], wanted: int, *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind == wanted
    ]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_LETTERS_AND_REST.replace("DIGITS", r"\p{N}"))


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(_LETTERS_AND_REST.replace("DIGITS", r"\p{N}{1,3}"))


# Source: llama.cpp, src/llama-vocab.cpp, and the tokenizer.json of a model of each kind.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "llama-bpe": _llama3,
}


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        """Parse up to the end tag and return what is between."""
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ("name:endgeneration",), drop_needle=True
        )
        return body


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The template language as transformers sets it up."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
