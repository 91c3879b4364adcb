"""The clients that people have, openai for Python and Node; and the trained model behind them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from worker_process import MODEL_ID, NAME, Process, chat

from deepseek_worker.chat_format import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR

# Knows tools, opens the thought, and writes calls in the form of V3.1.
TEMPLATE = "{{ '</think>' }}{{ '<｜tool▁sep｜>' }}{% if tools %}{{ tool_calls }}{% endif %}"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FLAT_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CALL = f'{CALL_BEGIN}weather{SEPARATOR}{{"city": "Rome"}}{CALL_END}'
NODE_FOLDER = Path(__file__).parent / "node"


class Capital(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    country: str
    capital: str = pydantic.Field(max_length=20)


@pytest.fixture(scope="module")
def thinking(scripted_module: Any) -> Iterator[Any]:
    engine = scripted_module.Engine()
    engine.max_context_tokens = engine.pool_pages = 4096
    with scripted_module.running(engine, chat_template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def client(thinking: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def say(server: Any, text: str) -> None:
    server.engine.reply = lambda _: text.encode()


def test_a_chat_stream_is_accumulated_to_the_whole_answer(
    thinking: Any, client: openai.OpenAI
) -> None:
    say(thinking, f"Hm.</think>I look.{CALLS_BEGIN}{CALL}{CALL}{CALLS_END}")
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}

    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]

    assert (whole.finish_reason, final.finish_reason) == ("tool_calls", "tool_calls")
    assert whole.message.content == final.message.content == "I look."
    assert whole.message.reasoning_content == final.message.reasoning_content == "Hm."  # type: ignore[attr-defined]
    for message in (whole.message, final.message):
        assert [call.function.name for call in message.tool_calls or ()] == ["weather", "weather"]
        assert {call.function.arguments for call in message.tool_calls or ()} == {
            '{"city": "Rome"}'
        }


def test_a_conversation_with_tools_goes_on(thinking: Any, client: openai.OpenAI) -> None:
    say(thinking, f"Hm.</think>{CALLS_BEGIN}{CALL}{CALLS_END}")
    messages: list[Any] = [{"role": "user", "content": "x"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
    message = answer.choices[0].message
    assert message.tool_calls is not None

    say(thinking, "So.</think>Sunny.")
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])

    assert answer.choices[0].message.content == "Sunny."


def test_a_response_stream_is_accumulated_to_the_whole_answer(
    thinking: Any, client: openai.OpenAI
) -> None:
    say(thinking, f"Hm.</think>I look.{CALLS_BEGIN}{CALL}{CALLS_END}")
    asked: Any = {"model": "tiny", "input": "x", "tools": [FLAT_TOOL]}

    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()

    for response in (whole, final):
        thought, message, call = response.output
        assert (thought.type, message.type, call.type) == (
            "reasoning",
            "message",
            "function_call",
        )
        assert thought.content[0].text == "Hm."
        assert response.output_text == "I look."
        assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == len("Hm.</think>")
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"

    say(thinking, "So.</think>Sunny.")
    output = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "sun"}
    history: Any = [{"role": "user", "content": "x"}, *final.output, output]
    assert client.responses.create(model="tiny", input=history).output_text == "Sunny."


def test_errors_of_responses_have_their_classes(thinking: Any, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")

    assert wrong.value.param == "previous_response_id"


@pytest.fixture(scope="module")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with openai for Node, by the lock, in the cache."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed here")
    cache = Path(os.environ.get("DEEPSEEK_CACHE", Path.home() / ".cache/deepseek")) / "node"
    lock = (NODE_FOLDER / "package-lock.json").read_bytes()
    installed = cache / "package-lock.json"
    if not (cache / "node_modules/openai").is_dir() or installed.read_bytes() != lock:
        cache.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE_FOLDER / name, cache / name)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(cache)
            pytest.skip(f"npm ci failed here: {done.stderr.strip()[-300:]}")
    return cache / "node_modules"


@pytest.mark.model
def test_openai_for_node_reads_everything(
    scripted: Any, node_modules: Path, tmp_path: Path
) -> None:
    engine = scripted.Engine()
    engine.max_context_tokens = engine.pool_pages = 4096
    text = f"Hm.</think>I look.{CALLS_BEGIN}{CALL}{CALLS_END}"
    engine.reply = lambda _: text.encode()
    shutil.copy(NODE_FOLDER / "read.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(node_modules)

    with scripted.running(engine, chat_template=TEMPLATE) as server:
        done = subprocess.run(
            ["node", "read.mjs", f"{server.url}/v1", json.dumps(TOOL), json.dumps(FLAT_TOOL)],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for kind in ("whole", "stream"):
        message = said[kind]["message"]
        assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
        assert said[kind]["finish_reason"] == "tool_calls"
    for kind in ("response", "response_stream"):
        assert said[kind]["text"] == "I look."
        assert said[kind]["call"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert said["completion"] == text
    assert said["completion_stream"] == text
    assert said["usage"] > 0
    assert said["models"] == ["tiny", "tiny-v1"]
    assert said["error"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_model_s_answers_have_the_structure_that_was_asked_for(worker: Process) -> None:
    client = worker.openai

    parsed = client.chat.completions.parse(
        model=NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=60,
        response_format=Capital,
    )
    loose = chat(worker, "Say something.", response_format={"type": "json_object"}, max_tokens=150)
    date = chat(worker, "When?", extra_body={"structured_outputs": {"regex": r"\d{4}-\d\d-\d\d"}})
    word = client.completions.create(
        model=NAME,
        prompt="Is the sky blue? Answer:",
        temperature=1,
        seed=4,
        max_tokens=30,
        extra_body={"structured_outputs": {"choice": [" yes", " no, never"]}},
    )

    assert parsed.choices[0].message.parsed is not None
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].message.parsed.capital
    if loose.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(loose.choices[0].message.content), dict)
    assert loose.choices[0].message.content.lstrip().startswith("{")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date.choices[0].message.content)
    assert word.choices[0].text in (" yes", " no, never")


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_model_calls_the_tool_that_it_has_to(worker: Process) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
    asked: Any = {"model": NAME, "messages": messages, "tools": [TOOL], "temperature": 0}

    whole = worker.openai.chat.completions.create(**asked, tool_choice="required", max_tokens=100)
    with worker.openai.chat.completions.stream(
        **asked, tool_choice=named, max_tokens=100
    ) as stream:
        streamed = stream.get_final_completion()

    for answer in (whole, streamed):
        (call, *_) = answer.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    messages += [
        whole.choices[0].message.model_dump(exclude_none=True),
        *(
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            for call in whole.choices[0].message.tool_calls or ()
        ),
    ]
    after = worker.openai.chat.completions.create(**asked, tool_choice="none", max_tokens=5)
    assert after.choices[0].message.tool_calls is None


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_model_answers_responses_as_it_answers_chats(worker: Process) -> None:
    question = "What is the capital of France?"
    said = chat(worker, question).choices[0].message.content

    whole = worker.openai.responses.create(
        model=NAME, input=question, temperature=0, max_output_tokens=30
    )
    with worker.openai.responses.stream(
        model=NAME, input=question, temperature=0, max_output_tokens=30
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    short = worker.openai.responses.create(model=NAME, input=question, max_output_tokens=2)
    parsed = worker.openai.responses.parse(
        model=NAME, input=question, temperature=0, text_format=Capital, max_output_tokens=60
    )

    assert whole.output_text == final.output_text == "".join(deltas) == said
    assert whole.model == MODEL_ID
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    assert parsed.output_parsed is not None


@pytest.mark.model
@pytest.mark.timeout(300)
def test_tokens_of_the_model_s_tokenizer_go_there_and_back(worker: Process) -> None:
    text = "Hello, wörld 🙂"

    cut = worker.client.post("/tokenize", json={"model": NAME, "prompt": text}).json()
    back = worker.client.post("/detokenize", json={"model": NAME, "tokens": cut["tokens"]}).json()
    answer = worker.openai.completions.create(model=NAME, prompt=cut["tokens"], max_tokens=1)

    assert back == {"prompt": text}
    assert cut["max_model_len"] == 512
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == cut["count"] == len(cut["tokens"])


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_message_is_continued_where_it_ends(worker: Process) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Count to ten in digits."},
        {"role": "assistant", "content": "1, 2, 3,"},
    ]

    answer = worker.openai.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=4,
        extra_body={"continue_final_message": True},
    )  # fmt: skip

    assert answer.choices[0].message.content.startswith(" 4")


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_token_that_the_tokenizer_added_can_be_biased_and_stopped_at(worker: Process) -> None:
    added = 2  # <|im_end|>, which the tokenizer's own vocabulary lacks.
    ask = {"model": NAME, "prompt": "One two three", "max_tokens": 5, "temperature": 0}
    banned = worker.client.post("/v1/completions", json={**ask, "logit_bias": {str(added): -100}})
    forced = worker.client.post(
        "/v1/completions",
        json={**ask, "logit_bias": {str(added): 100}, "ignore_eos": True},
    ).json()
    stopped = worker.client.post(
        "/v1/completions",
        json={
            **ask, "logit_bias": {str(added): 100}, "ignore_eos": True, "stop_token_ids": [added],
        },
    ).json()  # fmt: skip

    assert banned.status_code == 200
    assert (forced["choices"][0]["text"], forced["usage"]["completion_tokens"]) == ("", 5)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 1
