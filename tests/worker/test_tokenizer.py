"""Tokenizers and chat templates from a model's own files, of both kinds."""

import itertools
import threading
import time

import gguf
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from deepseek_worker.errors import (
    BrokenCheckpoint,
    ModelNotFound,
    TemplateError,
    UnsupportedModel,
)
from deepseek_worker.tokenizer import _byte_of_character, load_tokenizer

BYTES = sorted(_byte_of_character(), key=_byte_of_character().get)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
SPECIAL = ["<|begin|>", "<|end|>"]
USER = "<think>"
TOKENS = [*BYTES, *["".join(pair) for pair in MERGES], *SPECIAL, USER]
BEGIN, END, THINK = (TOKENS.index(token) for token in (*SPECIAL, USER))
USERS = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}"
    "{% endif %}{{ bos_token }}{{ m.role }}: {{ m.content + '' | trim }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{{ extra | default('') }}{% endif %}"
)


def write_folder(folder, template=TEMPLATE, **config):
    import json

    fast = FastTokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(TOKENS)}, merges=MERGES)
    )
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(SPECIAL)
    fast.add_tokens([USER])
    fast.save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}} | config
    if template is not None:
        content["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    return folder


def write_gguf(path, pre="gpt-2", model="gpt2", template=TEMPLATE, adds_bos=None):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    kinds = [1] * len(TOKENS)
    kinds[BEGIN] = kinds[END] = 3
    kinds[THINK] = 4
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(params=["folder", "gguf"])
def tokenizer(request, tmp_path):
    if request.param == "folder":
        return load_tokenizer(write_folder(tmp_path))
    return load_tokenizer(write_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize("text", ["hello world", "é 😀 日本\n\t", "<think>a</think>", "", "  x"])
def test_text_survives_the_round_trip(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_apply(tokenizer):
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("hello w")] == [
        b"hell",
        b"o",
        b" w",
    ]


def test_special_tokens_are_one_token_and_skipped_on_request(tokenizer):
    ids = tokenizer.encode("<|begin|>hello<|end|>")

    assert (ids[0], ids[-1]) == (BEGIN, END)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|>hello<|end|>"
    assert tokenizer.special_token_ids == {BEGIN, END}


def test_user_defined_tokens_are_one_token_and_shown(tokenizer):
    assert tokenizer.encode(USER) == [THINK]
    assert tokenizer.decode([THINK]) == USER


def test_bytes_of_tokens_are_exact_even_inside_a_character(tokenizer):
    ids = tokenizer.encode("😀<|end|>")

    assert b"".join(tokenizer.token_bytes(token) for token in ids) == "😀<|end|>".encode()
    assert "😀".encode().startswith(tokenizer.token_bytes(ids[0]))
    assert tokenizer.token_bytes(ids[0]) != "😀".encode()


def test_ids_beyond_the_vocabulary_are_empty(tokenizer):
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.decode([10_000, 60_000]) == ""
    assert tokenizer.token_bytes(10_000) == b""


def test_the_template_is_rendered_with_its_variables(tokenizer):
    text = tokenizer.apply_chat_template(USERS, tools=[{"name": "ü<"}], extra="!")

    assert text == '<|begin|>user: hello\n[{"name": "ü<"}]assistant:!'
    assert tokenizer.apply_chat_template(USERS, add_generation_prompt=False).endswith("hello\n")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "bad", "content": "x"}, "no such role"),
        ({"role": "user", "content": 5}, "refuses these messages"),
    ],
)
def test_what_the_template_refuses_is_an_error_with_its_words(message, said, tokenizer):
    with pytest.raises(TemplateError, match=said):
        tokenizer.apply_chat_template([message])


def test_the_template_cannot_reach_the_interpreter(tmp_path):
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = load_tokenizer(write_folder(tmp_path, template))

    with pytest.raises(TemplateError):
        tokenizer.apply_chat_template(USERS)


def test_a_broken_template_is_said_when_it_is_used(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, "{% for %}"))

    with pytest.raises(TemplateError, match="is broken"):
        tokenizer.apply_chat_template(USERS)


def test_without_a_template_chat_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, None))

    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.apply_chat_template(USERS)


def test_named_templates_and_template_files_are_found(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path, named)
    assert load_tokenizer(folder).apply_chat_template(USERS) == "D"

    (folder / "chat_template.jinja").write_text("{% generation %}F{% endgeneration %}")
    assert load_tokenizer(folder).apply_chat_template(USERS) == "F"


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    folder = write_folder(tmp_path)
    assert load_tokenizer(folder).eos_token_ids == {5}

    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert load_tokenizer(folder).eos_token_ids == {6, 7}


def test_the_begin_token_is_added_where_the_model_wants_it(tmp_path):
    plain = load_tokenizer(write_folder(tmp_path))
    eager = load_tokenizer(write_folder(tmp_path, add_bos_token=True))

    assert plain.encode("o") == eager.encode("o")[1:]
    assert eager.encode("o")[0] == BEGIN
    assert eager.encode("<|begin|>o")[:2] == [BEGIN, *plain.encode("o")]
    assert eager.encode("o", add_special_tokens=False) == plain.encode("o")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "ab 123", ["ab", " ", "1", "2", "3"]),
        ("qwen2", "ab 123", ["ab", " ", "1", "2", "3"]),
        ("llama-bpe", "ab 1234", ["ab", " ", "123", "4"]),
        ("gpt-2", "ab 1234", ["ab", " 1234"]),
        ("deepseek-r1-qwen", "it'S 7", ["it", "'S", " ", "7"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre, text, pieces, tmp_path):
    fast = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre))._fast

    parts = [part for part, _ in fast.pre_tokenizer.pre_tokenize_str(text)]

    assert [part.replace("Ġ", " ") for part in parts] == pieces


def test_llama_3_files_add_the_begin_token_unless_they_say_no(tmp_path):
    assert load_tokenizer(write_gguf(tmp_path / "a.gguf", "llama-bpe")).encode("o")[0] == BEGIN
    silent = write_gguf(tmp_path / "b.gguf", "llama-bpe", adds_bos=False)
    assert load_tokenizer(silent).encode("o")[0] != BEGIN


@pytest.mark.parametrize(
    ("options", "named"), [({"pre": "bloom"}, "bloom"), ({"model": "llama"}, "'llama'")]
)
def test_tokenizers_that_are_not_known_are_refused(options, named, tmp_path):
    with pytest.raises(UnsupportedModel, match=named):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", **options))


def test_missing_and_broken_files_are_named(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(BrokenCheckpoint, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)

    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BrokenCheckpoint, match=r"tokenizer\.json"):
        load_tokenizer(folder)

    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        load_tokenizer(folder)


def test_byte_fallback_vocabularies_are_read_too(tmp_path):
    fast = FastTokenizer(models.BPE(vocab={"\u2581a": 0, "<0xC3>": 1}, merges=[]))
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")

    tokenizer = load_tokenizer(tmp_path)

    assert tokenizer.token_bytes(0) == b" a"
    assert tokenizer.token_bytes(1) == b"\xc3"


@pytest.mark.model
def test_the_trained_models_tokenizer_knows_its_template(trained_model):
    tokenizer = load_tokenizer(trained_model)

    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.eos_token_ids == {2}
    prompt = tokenizer.apply_chat_template(USERS)
    assert prompt.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer):
    text = "hello world " * 100_000
    ended_at = []

    def encode():
        tokenizer.encode(text)
        ended_at.append(time.monotonic())

    thread = threading.Thread(target=encode)
    begun_at = time.monotonic()
    thread.start()
    moments = [time.monotonic()]
    while thread.is_alive():
        time.sleep(0.001)
        moments.append(time.monotonic())
    thread.join()

    longest = max(later - earlier for earlier, later in itertools.pairwise([begun_at, *moments]))
    assert longest < (ended_at[0] - begun_at) / 2
