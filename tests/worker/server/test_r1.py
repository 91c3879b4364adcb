"""R1 as its files have it: markers that are tokens of their own, and a template that opens the
thought, lists no tools and writes calls only in turns without content."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from deepseek_worker.chat_format import MARKERS, ChatFormat
from deepseek_worker.tokenizer import Tokenizer, load_tokenizer

END = "<｜end▁of▁sentence｜>"
TEMPLATE = (
    "{% set ns = namespace(system='', first=true) %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}"
    "{% endfor %}{{ bos_token }}{{ ns.system }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' and message['content'] is none %}"
    "{% for tool in message['tool_calls'] %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>"
    "<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + "
    "'\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{% endif %}"
    "{% if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] }}"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}


@pytest.fixture(scope="module", params=[False, True], ids=["plain markers", "special markers"])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte, and one for each marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(END, special=True)])
    fast.add_tokens([AddedToken(m, special=request.param, normalized=False) for m in MARKERS])
    folder: Path = tmp_path_factory.mktemp("r1")
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def r1(scripted_module: Any, tokenizer: Tokenizer) -> Iterator[Any]:
    engine = scripted_module.Engine()
    engine.max_context_tokens = engine.pool_pages = 4096
    engine.vocab_size = tokenizer.vocab_size + 5
    with scripted_module.running(engine, tokenizer=tokenizer) as server:
        yield server


def script(server: Any, text: str) -> None:
    token_ids = server.worker.model.tokenizer.encode(text)
    server.engine.reply = lambda _: token_ids


def test_markers_are_read_as_tokens_and_not_shown(r1: Any) -> None:
    call = ChatFormat.of(TEMPLATE).written_call("look", '{"at": 1}')
    script(r1, f"Hm.\n</think>\n\nI look.<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>")

    body = r1.chat(tools=[TOOL], max_tokens=500).json()

    (choice,) = body["choices"]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] == "I look."
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "look",
        "arguments": '{"at": 1}',
    }
    # Four bytes and the marker, which is one token.
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_a_forced_call_is_made_of_the_marker_tokens(r1: Any) -> None:
    script(r1, "Hm.</think>" + "?" * 300)

    choice = r1.chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).json()

    (choice,) = choice["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["at"] in range(10)
    assert r1.worker.model.grammar_marker("<｜tool▁sep｜>").startswith("<[")


def test_markers_cannot_be_part_of_a_structured_text(r1: Any) -> None:
    script(r1, 'Hm.</think>{"a": "<｜tool▁sep｜>"}')

    (choice,) = r1.chat(response_format={"type": "json_object"}, max_tokens=60).json()["choices"]

    assert "<｜tool▁sep｜>" not in choice["message"]["content"]


def test_tools_and_earlier_calls_reach_the_model(r1: Any) -> None:
    script(r1, "</think>Yes.")
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a cat"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "d"}]},
        {"role": "tool", "tool_call_id": "d", "content": "a dog"},
    ]

    assert r1.chat(messages=messages, tools=[TOOL], max_tokens=9).status_code == 200

    request = r1.engine.seen[-1]
    prompt = b"".join(map(r1.worker.model.tokenizer.token_bytes, request.prompt_token_ids)).decode()
    assert prompt.startswith("## Tools\n")
    written = ChatFormat.of(TEMPLATE).written_call("look", '{"at": 1}')
    assert prompt.count(written) == 2
    assert f"<｜Assistant｜>I look.{END}" in prompt
    assert prompt.endswith("<｜Assistant｜><think>\n")
