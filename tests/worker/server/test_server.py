"""The API over real connections; the engine follows a script."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepseek_worker.sequence import Output

USER = [{"role": "user", "content": "hello"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which has to end as promised."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]], choice: int = 0) -> str:
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice]
    return "".join(part.get("text", part.get("delta", {}).get("content", "")) for part in parts)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# Whole answers.


def test_a_completion_has_the_form_of_the_api(api: Any) -> None:
    response = api.complete(max_tokens=5)

    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-deepseek-model"] == "tiny-v1"
    assert response.headers["x-request-id"] == body["id"]
    assert body["id"].startswith("cmpl-")
    assert abs(body["created"] - time.time()) < 60
    del body["id"], body["created"]
    assert body == {
        "object": "text_completion",
        "model": "tiny-v1",
        "choices": [{"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_chat_has_the_form_of_the_api_and_the_template_s_prompt(api: Any) -> None:
    api.engine.reply = lambda _: b"yes"

    response = api.chat(chat_template_kwargs={"thinking": False})

    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "yes", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    # The token that ended the answer is counted and not shown.
    assert body["usage"]["completion_tokens"] == 4
    (request,) = api.engine.seen
    assert bytes(request.prompt_token_ids) == b'<user>hello\n{"thinking": false}<assistant>'


def test_prompts_and_answers_are_numbered_through(api: Any) -> None:
    api.engine.reply = lambda request: bytes(request.prompt_token_ids).upper()

    body = api.complete(prompt=["ab", "cd"], n=2, seed=5).json()

    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "AB"), (1, "AB"), (2, "CD"), (3, "CD"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 4
    assert [request.sampling.seed for request in api.engine.seen] == [5, 6, 7, 8]


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]]])
def test_prompts_may_be_tokens(api: Any, prompt: Any) -> None:
    assert api.complete(prompt=prompt, max_tokens=1, echo=True).json()["choices"][0]["text"] == (
        "hia"
    )


def test_a_completion_without_max_tokens_has_sixteen_or_what_the_context_holds(api: Any) -> None:
    usages = [api.complete(prompt="x" * size).json()["usage"] for size in (10, 250)]

    assert [usage["completion_tokens"] for usage in usages] == [16, 6]


def test_a_chat_without_max_tokens_fills_the_context(api: Any) -> None:
    assert api.chat().json()["usage"]["total_tokens"] == 256


def test_max_completion_tokens_is_max_tokens(api: Any) -> None:
    assert api.chat(max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_scoring_gives_the_prompt_s_logprobs_and_no_new_token(api: Any) -> None:
    body = api.complete(prompt="hey", max_tokens=0, echo=True, logprobs=1).json()

    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hey", "length")
    assert choice["logprobs"] == {
        "tokens": ["h", "e", "y"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"e": -0.5}, {"y": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert body["usage"]["completion_tokens"] == 0


def test_scoring_with_one_new_token_adds_it(api: Any) -> None:
    (choice,) = api.complete(prompt="hey", max_tokens=1, echo=True, logprobs=0).json()["choices"]

    assert choice["text"] == "heya"
    assert choice["logprobs"]["tokens"] == ["h", "e", "y", "a"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["top_logprobs"] is None


def test_twenty_alternatives_come_with_their_bytes(api: Any) -> None:
    api.engine.reply = lambda _: [0xF0]

    (choice,) = api.chat(logprobs=True, top_logprobs=20, max_tokens=1).json()["choices"]

    (token,) = choice["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("bytes:\\xf0", [0xF0])
    assert len(token["top_logprobs"]) == 20
    assert len({top["token"] for top in token["top_logprobs"]}) == 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", range(1, 9))
def test_the_answer_ends_before_its_stop_string(api: Any, stream: bool, length: int) -> None:
    stop = "defghabc"[:length]

    response = api.complete(stop=["zz", stop], max_tokens=100, stream=stream)

    if stream:
        chunks = events(response)
        assert text_of(chunks) == "abc"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert response.json()["choices"][0]["text"] == "abc"
        assert response.json()["choices"][0]["finish_reason"] == "stop"
    api.wait_until_idle()


def test_text_held_back_for_a_stop_string_comes_at_the_end(api: Any) -> None:
    chunks = events(api.complete(stop="gh!", max_tokens=8, stream=True))

    assert text_of(chunks) == "abcdefgh"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["🙂👨‍👩‍👧‍👦", "안녕하세요", "नमस्ते", "𠜎"])
def test_no_character_is_broken_over_chunks(api: Any, text: str) -> None:
    api.engine.reply = lambda _: text.encode()

    chunks = events(api.complete(max_tokens=100, stream=True))

    assert text_of(chunks) == text == api.complete(max_tokens=100).json()["choices"][0]["text"]
    assert not any("\ufffd" in part["text"] for chunk in chunks for part in chunk["choices"])


# Streams.


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_chat_stream_says_why_it_ended_in_its_last_chunk_alone(api: Any, end: str) -> None:
    api.engine.reply = lambda _: b"yes"

    chunks = events(api.chat(stream=True, max_tokens=9 if end == "stop" else 2))

    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [end]
    assert text_of(chunks) == ("yes" if end == "stop" else "ye")
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("stop", [None, "c"])
def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(
    api: Any, kind: str, stop: str | None
) -> None:
    ask = getattr(api, kind)
    options: dict[str, Any] = {"max_tokens": 7, "stop": stop}
    whole = ask(**options).json()

    chunks = events(ask(stream=True, stream_options={"include_usage": True}, **options))

    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])


def test_a_stream_of_several_answers_keeps_them_apart(api: Any) -> None:
    api.engine.reply = lambda request: bytes(request.prompt_token_ids) * 3

    chunks = events(api.complete(prompt=["ab", "cd"], stream=True, max_tokens=6, echo=True))

    assert (text_of(chunks, 0), text_of(chunks, 1)) == ("abababab", "cdcdcdcd")


def test_logprobs_stream_with_their_tokens(api: Any) -> None:
    chunks = events(api.chat(stream=True, logprobs=True, max_tokens=4, stop="zz"))

    tokens = [
        entry["token"]
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert tokens == ["a", "b", "c", "d"]


def test_an_error_within_a_stream_is_an_event_and_the_stream_ends(api: Any) -> None:
    api.engine.fault = lambda request: Output(
        request.request_id,
        finish_reason="error",
        error="the logits are not finite",
        error_reason="NonFiniteLogits",
    )

    chunks = events(api.chat(stream=True, stream_options={"include_usage": True}))

    assert chunks[-1]["error"]["type"] == "server_error"
    assert "NonFiniteLogits" in chunks[-1]["error"]["message"]
    api.wait_until_idle()


@pytest.mark.parametrize(("reason", "status"), [("NonFiniteLogits", 500), ("OutOfMemory", 503)])
def test_an_answer_that_fails_is_an_error_and_the_next_one_works(
    api: Any, reason: str, status: int
) -> None:
    api.engine.fault = lambda request: Output(
        request.request_id, finish_reason="error", error="no", error_reason=reason
    )

    response = api.complete(prompt=["a", "b"], max_tokens=9)

    api.engine.fault = lambda _: None
    assert (response.status_code, "retry-after" in response.headers) == (status, status == 503)
    assert reason in error_of(response)["message"]
    assert api.complete().status_code == 200
    api.wait_until_idle()


# What is refused.


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[], [1]], ["a", ""]])
def test_an_empty_prompt_is_refused_alone(api: Any, prompt: Any) -> None:
    response = api.complete(prompt=prompt)

    assert response.status_code == 400
    assert error_of(response)["param"].startswith("prompt")
    assert "empty" in error_of(response)["message"]
    assert api.engine.seen == []
    assert api.complete().status_code == 200


@pytest.mark.parametrize(("size", "wanted"), [(256, 1), (257, 1), (200, 57), (5, 10**9), (300, 16)])
def test_prompt_and_answer_beyond_the_context_are_refused_with_the_numbers(
    api: Any, size: int, wanted: int
) -> None:
    response = api.complete(prompt="x" * size, max_tokens=wanted)

    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    for number in (256, size + wanted, size, wanted):
        assert str(number) in error["message"]


def test_prompt_and_answer_that_just_fit_are_served(api: Any) -> None:
    assert api.complete(prompt="x" * 200, max_tokens=56).status_code == 200
    assert api.complete(prompt="x" * 256, max_tokens=0).status_code == 200
    assert api.complete(prompt="x" * 256).status_code == 400


def test_what_can_never_fit_the_pool_is_refused_at_once(api: Any) -> None:
    api.engine.pool_pages = 8

    started = time.monotonic()
    response = api.complete(prompt="x" * 113, max_tokens=16)

    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert time.monotonic() - started < 1
    assert api.complete(prompt="x" * 112, max_tokens=16).status_code == 200


def test_a_conversation_that_the_template_refuses_is_the_client_s_error(api: Any) -> None:
    response = api.chat(messages=USER * 2)

    assert response.status_code == 400
    assert "roles must alternate" in error_of(response)["message"]


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt"])
def test_template_options_cannot_replace_the_request(api: Any, name: str) -> None:
    response = api.chat(chat_template_kwargs={name: 1})

    assert (response.status_code, error_of(response)["param"]) == (400, "chat_template_kwargs")


def test_a_model_that_is_not_served_is_not_found(api: Any) -> None:
    for response in (api.chat(model="gpt-4"), api.complete(model="gpt-4"), api.get("/v1/models/x")):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
        assert "'tiny' does" in error_of(response)["message"]


def test_tokens_that_the_model_does_not_have_are_refused(api: Any) -> None:
    response = api.complete(prompt=[1, 257])

    assert (response.status_code, error_of(response)["param"]) == (400, "prompt[1]")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"temperature": NaN}'])
def test_rubbish_is_refused(api: Any, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = api.post(path, body)

        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_json"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(api: Any) -> None:
    with api.connect() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
        connection.sendall(head.encode())

        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"8388608 bytes" in answer
    assert b"connection: close" in answer


def test_a_body_without_a_length_is_refused_when_it_gets_too_large(api: Any) -> None:
    def chunks() -> Any:
        for _ in range(200):
            yield b"x" * 65536

    try:
        response = api.client.post(api.url + "/v1/completions", content=chunks())
    except httpx.WriteError:
        return
    assert response.status_code == 413


def test_what_is_not_served_says_so_in_the_api_s_form(api: Any) -> None:
    missing, wrong = api.get("/v1/embeddings"), api.get("/v1/completions")

    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert error_of(missing)["code"] == "unknown_url"
    assert wrong.headers["allow"] == "POST"


def test_more_than_the_queue_holds_is_refused_with_when_to_come_back(api: Any) -> None:
    api.engine.max_unfinished = 0

    response = api.complete()

    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert error_of(response)["code"] == "engine_overloaded"


def test_a_request_with_many_prompts_is_taken_whole_or_not_at_all(api: Any) -> None:
    api.engine.max_running = 0
    api.engine.max_unfinished = 3

    response = api.complete(prompt=["a", "b", "c", "d", "e"])

    assert response.status_code == 429
    api.engine.max_running = 8
    api.wait_until_idle()


def test_an_error_of_our_own_is_a_500_and_tells_nothing_of_the_inside(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.worker.model.tokenizer, "encode", lambda *_, **__: 1 / 0)

    response = api.complete()

    assert response.status_code == 500
    assert error_of(response)["message"] == "The worker failed; its log says why."
    assert response.headers["connection"] == "close"


# Other routes.


def test_both_names_of_the_model_are_listed_and_served(api: Any) -> None:
    listed = api.get("/v1/models").json()

    assert [card["id"] for card in listed["data"]] == ["tiny", "tiny-v1"]
    assert {card["max_model_len"] for card in listed["data"]} == {256}
    assert api.get("/v1/models/tiny-v1").json()["object"] == "model"
    assert api.complete(model="tiny-v1").json()["model"] == "tiny-v1"


def test_the_version_is_told(api: Any) -> None:
    assert api.get("/version").json().keys() == {"version"}


def test_keys_and_tokens_are_asked_for(scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-one\nsk-two\n")
    (tmp_path / "token").write_text("state\n")
    files = {"api_key_file": tmp_path / "keys", "state_token_file": tmp_path / "token"}

    with scripted.running(**files) as server:
        bearer = {key: {"authorization": f"Bearer {key}"} for key in ("sk-two", "state", "x")}
        models = [
            server.get("/v1/models", headers=headers).status_code
            for headers in ({}, bearer["x"], bearer["state"], bearer["sk-two"])
        ]
        completion = server.complete()
        state = [
            server.get("/state", headers=headers).status_code
            for headers in ({}, bearer["x"], bearer["sk-two"], bearer["state"])
        ]
        free = [server.get(path).status_code for path in ("/health/live", "/metrics", "/version")]

    assert models == [401, 401, 401, 200]
    assert completion.status_code == 401
    assert error_of(completion)["code"] == "invalid_api_key"
    assert completion.headers["www-authenticate"] == "Bearer"
    assert state == [401, 401, 401, 200]
    assert free == [200, 200, 200]


def test_the_state_is_what_the_contract_says(scripted: Any, tmp_path: Path) -> None:
    from deepseek_contract.state import WorkerState

    (tmp_path / "token").write_text("state")
    with scripted.running(state_token_file=tmp_path / "token") as server:
        body = server.get("/state", headers={"authorization": "Bearer state"}).text

    state = WorkerState.from_json(body)
    assert (state.phase, state.served_name, state.model_id) == ("ready", "tiny", "tiny-v1")
    assert (state.pool_pages, state.free_pages, state.page_tokens) == (64, 64, 16)
    assert state.memory.measured_bytes == {"weights": 110, "kv_cache": 640}
    assert state.used_percent == 11.0


def test_without_a_token_the_state_is_nobody_s_business(api: Any) -> None:
    assert api.get("/state").status_code == 404


def test_while_the_model_loads_the_port_is_open_and_says_so(scripted: Any) -> None:
    with scripted.running(loaded=False) as server:
        ready, live = server.get("/health/ready"), server.get("/health/live")
        models, completion = server.get("/v1/models"), server.complete()

    assert (ready.status_code, live.status_code) == (503, 200)
    assert (ready.json()["phase"], ready.json()["loading_progress"]) == ("loading", 0.0)
    assert models.json()["data"][0]["max_model_len"] is None
    assert completion.status_code == 503
    assert "loading" in error_of(completion)["message"]
    assert completion.headers["retry-after"]


def test_a_worker_is_ready_only_after_its_own_first_answer(api: Any) -> None:
    api.worker.is_warm = False
    cold = api.get("/health/ready")
    api.worker.is_warm = True

    assert cold.status_code == 503
    assert "first request" in cold.json()["message"]
    assert api.get("/health/ready").status_code == 200


def test_an_engine_that_makes_no_progress_is_neither_live_nor_ready(scripted: Any) -> None:
    with scripted.running(stall_seconds=0.3) as server:
        server.engine.gate.clear()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.complete)
            server.wait_until(lambda: server.get("/health/live").status_code == 503)
            live, ready = server.get("/health/live"), server.get("/health/ready")

            server.engine.gate.set()

            assert answer.result().status_code == 200
        server.wait_until(lambda: server.get("/health/live").status_code == 200)

    assert "finished no step" in live.json()["message"]
    assert ready.status_code == 503


def test_an_idle_engine_is_live_however_long_it_idles(scripted: Any) -> None:
    with scripted.running(stall_seconds=1.5) as server:
        time.sleep(2)
        assert server.get("/health/live").status_code == 200


def test_an_engine_that_broke_fails_what_runs_and_says_so(scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("state")
    with scripted.running(state_token_file=tmp_path / "token") as server:
        server.engine.reply = lambda _: 1 / 0

        broken, later = server.complete(), server.complete()

        live = server.get("/health/live")
        state = server.get("/state", headers={"authorization": "Bearer state"}).json()

    assert (broken.status_code, later.status_code, live.status_code) == (503, 503, 503)
    assert "EngineFailed" in error_of(broken)["message"]
    assert (state["phase"], state["reason"]) == ("failed", "InternalError")


# Clients that come, go and stay.


def stream_and_hang_up(api: Any, num_chunks: int = 2) -> None:
    with api.connect() as connection:
        body = {"model": "tiny", "messages": USER, "stream": True, "max_tokens": 200}
        api.send(connection, "/v1/chat/completions", body)
        reader = connection.makefile("rb")
        seen = 0
        while seen < num_chunks:
            seen += reader.readline().startswith(b"data: ")


def test_a_client_that_hangs_up_frees_its_pages_within_a_step(api: Any) -> None:
    aborts = api.metric('deepseek_requests_total{finish_reason="abort"}')
    api.engine.step_seconds = 0.02

    stream_and_hang_up(api)

    steps = api.stats().num_steps
    api.wait_until_idle()
    assert api.stats().num_steps - steps <= 3
    assert api.metric('deepseek_requests_total{finish_reason="abort"}') == aborts + 1


def test_a_client_that_hangs_up_without_a_stream_is_noticed_too(api: Any) -> None:
    api.engine.step_seconds = 0.02
    connection = api.connect()
    api.send(connection, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 200})
    api.wait_until(lambda: api.stats().num_running == 1)

    connection.close()

    steps = api.stats().num_steps
    api.wait_until_idle()
    assert api.stats().num_steps - steps <= 3


def test_two_hundred_clients_that_hang_up_leave_nothing(api: Any) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: stream_and_hang_up(api), range(200)))

    api.wait_until_idle()
    assert api.complete().status_code == 200


def test_two_hundred_clients_at_once_on_a_small_pool_are_all_served(api: Any) -> None:
    api.engine.pool_pages = 8
    api.engine.reply = lambda request: bytes(request.prompt_token_ids)
    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=api.url, limits=limits, timeout=60) as client:

        def ask(number: int) -> str:
            body = {"model": "tiny", "prompt": f"n{number:03d}", "stream": number % 2 == 0}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200
            if number % 2 == 0:
                return text_of(events(response))
            return response.json()["choices"][0]["text"]

        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(ask, range(200)))

    assert answers == [f"n{number:03d}" for number in range(200)]
    api.wait_until_idle()


def test_a_client_that_does_not_read_keeps_nobody_waiting(api: Any) -> None:
    with api.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = {"model": "tiny", "messages": USER, "stream": True}
        api.send(connection, "/v1/chat/completions", body)
        api.wait_until(lambda: len(api.engine.seen) == 1)

        assert api.complete().status_code == 200
        api.wait_until_idle()


def test_a_body_in_small_pieces_is_put_together(api: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    with api.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        for at in range(0, len(body), 7):
            connection.sendall(body[at : at + 7])
            time.sleep(0.001)

        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_hangs_up_within_its_body_leaves_nothing(api: Any) -> None:
    with api.connect() as connection:
        connection.sendall(
            b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model"'
        )

    assert api.complete().status_code == 200
    assert len(api.engine.seen) == 1


def test_long_texts_are_read_beside_the_event_loop(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = api.worker.model.tokenizer.encode

    def noted(text: str, **options: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text[:10], **options)

    monkeypatch.setattr(api.worker.model.tokenizer, "encode", noted)

    api.complete(prompt="x" * 10)
    api.complete(prompt="x" * 10_000)

    assert not threads[0].startswith("text")
    assert threads[1].startswith("text")
