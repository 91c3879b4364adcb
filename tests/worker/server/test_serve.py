"""The whole worker as a process: start, answers of the trained model, drain, end."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from worker_process import MODEL_ID, NAME, Process, chat

from deepseek_worker.main import run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv("TERMINATION_MESSAGE_PATH", str(path))
    return path


def test_a_model_that_is_not_there_ends_the_start(tmp_path: Path, last_words: Path) -> None:
    code = run(["serve", f"--model={tmp_path / 'nowhere'}", "--port=0", "--device=cpu"])

    words = json.loads(last_words.read_text())
    assert code == 3
    assert words["reason"] == "ModelNotFound"
    assert "nowhere" in words["message"]


def test_a_file_that_is_no_model_ends_the_start(tmp_path: Path, last_words: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 100)

    code = run(["serve", f"--model={tmp_path / 'model.gguf'}", "--port=0", "--device=cpu"])

    assert code == 3
    assert json.loads(last_words.read_text())["reason"] == "ModelUnusable"


def test_a_port_that_is_taken_ends_the_start(tmp_path: Path, last_words: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        code = run(["serve", "--model=m", "--host=127.0.0.1", f"--port={port}"])

    words = json.loads(last_words.read_text())
    assert (code, words["reason"]) == (2, "InvalidFlags")
    assert f"--port {port}: Address already in use" in words["message"]


def test_a_token_file_that_is_not_there_ends_the_start(tmp_path: Path, last_words: Path) -> None:
    code = run(["serve", "--model=m", "--port=0", f"--api-key-file={tmp_path / 'nowhere'}"])

    assert code == 2
    assert "--api-key-file" in json.loads(last_words.read_text())["message"]


@pytest.mark.model
def test_a_model_larger_than_its_memory_ends_the_start(
    trained_model: Path, last_words: Path
) -> None:
    code = run(["serve", f"--model={trained_model}", "--port=0", "--memory-limit-bytes=200000000"])

    words = json.loads(last_words.read_text())
    assert (code, words["reason"]) == (3, "ModelTooLarge")
    assert "may use 191 MiB" in words["message"]


@pytest.mark.model
def test_a_worker_loads_answers_drains_and_ends(trained_model: Path, tmp_path: Path) -> None:
    process = Process(trained_model, tmp_path, "--drain-seconds=60")
    said = process.wait_until_ready()
    assert any(answer["phase"] == "loading" for answer in said)
    assert any(0 < answer["loading_progress"] < 1 for answer in said)

    with (
        ThreadPoolExecutor() as pool,
        process.client.stream(
            "POST",
            "/v1/completions",
            json={"model": NAME, "prompt": "1 2 3 4", "stream": True, "max_tokens": 60,
                  "temperature": 0, "ignore_eos": True},
        ) as stream,
    ):  # fmt: skip
        lines = stream.iter_lines()
        first = next(line for line in lines if line)
        process.process.terminate()
        rest = pool.submit(lambda: [line for line in lines if line])
        deadline = time.monotonic() + 60
        with httpx.Client(base_url=process.url) as other:
            while other.get("/health/ready").status_code != 503:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            ready, live = other.get("/health/ready"), other.get("/health/live")
            # Who kept a connection does not know yet, and may ask for a moment.
            last = {"model": NAME, "prompt": "x", "max_tokens": 1}
            accepted = refused = other.post("/v1/completions", json=last)
            while refused.status_code == 200:
                assert refused.headers["connection"] == "close"
                assert time.monotonic() < deadline
                refused = other.post("/v1/completions", json=last)

        # The answer that was under way is complete, whatever the signal.
        chunks = [json.loads(line.removeprefix("data: ")) for line in [first, *rest.result()[:-1]]]

    assert ready.json()["phase"] == "draining"
    assert live.status_code == 200
    assert accepted.status_code == 200
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert refused.headers["retry-after"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert process.process.wait(60) == 0
    assert process.last_words.read_text() == ""
    process.stop()


@pytest.mark.model
def test_what_takes_longer_than_the_drain_is_told_so(quick_model: Path, tmp_path: Path) -> None:
    process = Process(quick_model, tmp_path, "--drain-seconds=0.3", "--max-context-tokens=90000")
    process.wait_until_ready()

    with process.client.stream(
        "POST",
        "/v1/completions",
        json={"model": NAME, "prompt": "1 2", "stream": True, "max_tokens": 80_000},
    ) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        process.process.terminate()
        last = list(lines)[-2:]

    assert "shut down before the answer was complete" in last[0]
    assert last[1] == "data: [DONE]"
    assert process.process.wait(60) == 0
    process.stop()


def test_adapters_are_served_beside_their_model(
    quick_model: Path, make_adapter: Any, merge: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(quick_model)
    tokenizer = Tokenizer.from_file(str(quick_model / "tokenizer.json"))
    adapter = make_adapter(model)
    process = Process(quick_model, tmp_path, f"--lora=terse={adapter}", "--max-context-tokens=99")
    process.wait_until_ready()

    with ThreadPoolExecutor() as pool:
        asked = {"prompt": "Hello", "max_tokens": 12, "temperature": 0}
        answers = {
            name: pool.submit(process.openai.completions.create, model=name, **asked)
            for name in ("terse", NAME)
        }
        texts = {name: answer.result().choices[0].text for name, answer in answers.items()}
    listed = [card.id for card in process.openai.models.list().data]
    with pytest.raises(openai.NotFoundError):
        process.openai.completions.create(model="other", **asked)

    assert process.stop() == 0
    assert listed == [NAME, MODEL_ID, "terse"]
    for name, wanted in ((NAME, model), ("terse", merge(model, adapter, 2.0))):
        tokens = tokenizer.encode("Hello").ids
        with torch.inference_mode():
            for _ in range(12):
                tokens.append(int(wanted(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert texts[name] == tokenizer.decode(tokens[5:])
    assert texts["terse"] != texts[NAME]


def test_an_adapter_that_is_not_there_ends_the_start(
    quick_model: Path, tmp_path: Path, last_words: Path
) -> None:
    code = run(["serve", f"--model={quick_model}", f"--lora=a={tmp_path / 'x'}", "--port=0"])

    words = json.loads(last_words.read_text())
    assert (code, words["reason"]) == (3, "ModelNotFound")
    assert f"adapter 'a': {tmp_path / 'x'} does not exist" in words["message"]


@pytest.mark.model
def test_a_second_signal_ends_at_once(quick_model: Path, tmp_path: Path) -> None:
    process = Process(quick_model, tmp_path, "--max-context-tokens=90000")
    process.wait_until_ready()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(
            httpx.post,
            f"{process.url}/v1/completions",
            json={"model": NAME, "prompt": "x", "max_tokens": 80_000},
            timeout=60,
        )
        while not process.metric("deepseek_requests_running"):
            time.sleep(0.05)
        process.process.terminate()
        while process.health("ready")[1].get("phase") != "draining":
            time.sleep(0.05)
        process.process.terminate()
        code = process.process.wait(60)
        with pytest.raises(httpx.TransportError):
            answer.result()

    assert code == 128 + signal.SIGTERM
    process.stop()


@pytest.mark.model
def test_a_signal_ends_a_load(trained_model: Path, tmp_path: Path) -> None:
    process = Process(trained_model, tmp_path)
    while process.health("ready")[0] is None:
        time.sleep(0.05)

    process.process.terminate()

    assert process.process.wait(60) == 0
    process.stop()


@pytest.mark.model
def test_the_openai_client_reads_every_answer(worker: Process) -> None:
    client = worker.openai

    completion = client.completions.create(
        model=NAME, prompt="The capital of France is", temperature=0, max_tokens=8, logprobs=2
    )
    answer = chat(worker, "What is the capital of France?", logprobs=True, top_logprobs=3)
    models = client.models.list()

    assert "Paris" in completion.choices[0].text
    assert completion.model == MODEL_ID
    assert len(completion.choices[0].logprobs.tokens) == 8
    assert all(value <= 0 for value in completion.choices[0].logprobs.token_logprobs)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    assert [model.id for model in models.data] == [NAME, MODEL_ID]
    assert client.models.retrieve(NAME).id == NAME


@pytest.mark.model
def test_the_openai_client_reads_every_stream(worker: Process) -> None:
    whole = chat(worker, "Name three fruits.")
    chunks = list(
        chat(worker, "Name three fruits.", stream=True, stream_options={"include_usage": True})
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert text == whole.choices[0].message.content
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.model
def test_the_openai_client_knows_every_error(worker: Process) -> None:
    with pytest.raises(openai.NotFoundError):
        worker.openai.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(worker, "x", temperature=3)
    with pytest.raises(openai.BadRequestError) as long:
        chat(worker, "word " * 600)

    assert wrong.value.param == "temperature"
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in str(long.value)


@pytest.mark.model
@pytest.mark.parametrize("stop", ["fox", "x j", "jumps", " ", "lazy dog"])
def test_stop_strings_hold_with_the_model_s_own_tokens(worker: Process, stop: str) -> None:
    ask = {
        "model": NAME,
        "prompt": "The quick brown fox jumps over the lazy dog. The quick brown",
        "temperature": 0,
        "max_tokens": 30,
    }
    free = worker.openai.completions.create(**ask).choices[0].text

    whole = worker.openai.completions.create(**ask, stop=stop).choices[0]
    stream = worker.openai.completions.create(**ask, stop=stop, stream=True)

    expected = free.partition(stop)[0]
    assert whole.text == expected
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    assert whole.finish_reason == ("stop" if stop in free else "length")


@pytest.mark.model
def test_the_logprobs_of_a_prompt_add_up_to_those_of_generating_it(worker: Process) -> None:
    ask = {"model": NAME, "temperature": 0, "logprobs": 0}
    made = worker.openai.completions.create(**ask, prompt="Once upon a time", max_tokens=10)
    text = "Once upon a time" + made.choices[0].text

    scored = worker.openai.completions.create(**ask, prompt=text, max_tokens=0, echo=True)

    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == text
    assert logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens) == text
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:at])) for at in range(len(logprobs.tokens))
    ]
    assert sum(logprobs.token_logprobs[-10:]) == pytest.approx(
        sum(made.choices[0].logprobs.token_logprobs), abs=1e-3
    )


@pytest.mark.model
def test_a_bias_against_all_but_one_token_gives_finite_logprobs(worker: Process) -> None:
    answer = chat(
        worker, "x", max_tokens=2, logit_bias={"100": 100, "101": -100}, logprobs=True,
        top_logprobs=20,
    )  # fmt: skip

    content = answer.choices[0].logprobs.content
    assert len(content) == 2
    assert all(-9999 <= top.logprob <= 0 for token in content for top in token.top_logprobs)


@pytest.mark.model
def test_seeds_repeat_and_differ(worker: Process) -> None:
    def ask(seed: int, **options: Any) -> list[str]:
        answer = chat(worker, "Tell me a story.", temperature=1, seed=seed, **options)
        return [choice.message.content for choice in answer.choices]

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)
    assert len(set(ask(1, n=3))) == 3


@pytest.mark.model
def test_clients_that_hang_up_and_clients_that_crowd_leave_nothing(worker: Process) -> None:
    pages = worker.idle_pages()
    aborted = 0

    def hang_up(number: int) -> None:
        with worker.client.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": NAME, "messages": [{"role": "user", "content": f"Count to {number}"}],
                  "stream": True, "max_tokens": 400, "ignore_eos": True},
        ) as stream:  # fmt: skip
            lines = stream.iter_lines()
            next(lines)

    def ask(number: int) -> str:
        response = worker.client.post(
            "/v1/completions",
            json={"model": NAME, "prompt": f"{number % 5} is", "max_tokens": 4, "temperature": 0},
        )
        assert response.status_code == 200
        return response.json()["choices"][0]["text"]

    alone = [ask(number) for number in range(5)]
    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=worker.url, timeout=120, limits=limits) as crowd:
        kept, worker.client = worker.client, crowd
        with ThreadPoolExecutor(200) as pool:
            gone = [pool.submit(hang_up, number) for number in range(40)]
            answers = list(pool.map(ask, range(160)))
            aborted = sum(future.result() is None for future in gone)
        worker.client = kept

    assert aborted == 40
    assert answers == [alone[number % 5] for number in range(160)]
    assert worker.idle_pages() == pages


@pytest.mark.model
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": "Hello?"},
        ],
        [{"role": "system", "content": "A"}, {"role": "system", "content": "B"},
         {"role": "user", "content": "Hi"}],
    ],
    ids=["developer", "parts and name", "empty turn", "two system turns"],
)  # fmt: skip
def test_odd_conversations_get_an_answer(worker: Process, messages: Any) -> None:
    answer = worker.openai.chat.completions.create(model=NAME, messages=messages, max_tokens=3)

    assert answer.usage.completion_tokens > 0


@pytest.mark.model
def test_the_log_is_json_and_tells_no_content(worker: Process) -> None:
    chat(worker, "my secret question", max_tokens=3)

    lines = [json.loads(line) for line in worker.log.read_text().splitlines()]
    requests = [SimpleNamespace(**line) for line in lines if line["message"] == "Request"]
    assert "secret" not in worker.log.read_text()
    assert requests[-1].outcome == "complete"
    assert requests[-1].completion_tokens == 3
