"""The API over real connections; the engine follows a script."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepseek_worker.board import WARM
from deepseek_worker.sequence import Output

USER = [{"role": "user", "content": "hello"}]


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
            "completion_tokens_details": {"reasoning_tokens": 0},
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
        chunks = api.events(response)
        assert api.text_of(chunks) == "abc"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert response.json()["choices"][0]["text"] == "abc"
        assert response.json()["choices"][0]["finish_reason"] == "stop"
    api.wait_until_idle()


def test_text_held_back_for_a_stop_string_comes_at_the_end(api: Any) -> None:
    chunks = api.events(api.complete(stop="gh!", max_tokens=8, stream=True))

    assert api.text_of(chunks) == "abcdefgh"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["🙂👨‍👩‍👧‍👦", "안녕하세요", "नमस्ते", "𠜎"])
def test_no_character_is_broken_over_chunks(api: Any, text: str) -> None:
    api.engine.reply = lambda _: text.encode()

    chunks = api.events(api.complete(max_tokens=100, stream=True))

    assert api.text_of(chunks) == text == api.complete(max_tokens=100).json()["choices"][0]["text"]
    assert not any("\ufffd" in part["text"] for chunk in chunks for part in chunk["choices"])


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_chat_stream_says_why_it_ended_in_its_last_chunk_alone(api: Any, end: str) -> None:
    api.engine.reply = lambda _: b"yes"

    chunks = api.events(api.chat(stream=True, max_tokens=9 if end == "stop" else 2))

    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [end]
    assert api.text_of(chunks) == ("yes" if end == "stop" else "ye")
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("stop", [None, "c"])
def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(
    api: Any, kind: str, stop: str | None
) -> None:
    ask = getattr(api, kind)
    options: dict[str, Any] = {"max_tokens": 7, "stop": stop}
    whole = ask(**options).json()

    chunks = api.events(ask(stream=True, stream_options={"include_usage": True}, **options))

    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])


def test_a_stream_of_several_answers_keeps_them_apart(api: Any) -> None:
    api.engine.reply = lambda request: bytes(request.prompt_token_ids) * 3

    chunks = api.events(api.complete(prompt=["ab", "cd"], stream=True, max_tokens=6, echo=True))

    assert (api.text_of(chunks, 0), api.text_of(chunks, 1)) == ("abababab", "cdcdcdcd")


def test_logprobs_stream_with_their_tokens(api: Any) -> None:
    chunks = api.events(api.chat(stream=True, logprobs=True, max_tokens=4, stop="zz"))

    tokens = [
        entry["token"]
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert tokens == ["a", "b", "c", "d"]


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
    assert reason in api.error_of(response)["message"]
    assert api.complete().status_code == 200
    api.wait_until_idle()


def test_what_can_never_fit_the_pool_is_refused_at_once(api: Any) -> None:
    api.engine.pool_pages = 8

    response = api.complete(prompt="x" * 113, max_tokens=16)

    assert response.status_code == 400
    assert api.error_of(response)["code"] == "context_length_exceeded"
    assert api.engine.seen == []
    assert api.complete(prompt="x" * 112, max_tokens=16).status_code == 200


def test_a_model_that_is_not_served_is_not_found(api: Any) -> None:
    for response in (api.chat(model="gpt-4"), api.complete(model="gpt-4"), api.get("/v1/models/x")):
        assert response.status_code == 404
        assert api.error_of(response)["code"] == "model_not_found"
        assert "'tiny' does" in api.error_of(response)["message"]

    unknown = api.error_of(api.complete(model="x" * 1_000_000))["message"]
    assert len(unknown) < 400
    assert "'tiny' does" in unknown


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"temperature": NaN}'])
def test_rubbish_is_refused(api: Any, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = api.post(path, body)

        assert response.status_code == 400
        assert api.error_of(response)["code"] == "invalid_json"


def test_responses_are_refused_in_their_own_words_whoever_refuses(api: Any) -> None:
    asked = {"model": "tiny", "input": "x", "max_output_tokens": 1000}
    error = api.error_of(api.post("/v1/responses", json.dumps(asked).encode()))

    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "lower 'max_output_tokens'" in error["message"]


def test_what_is_not_served_says_so_in_the_api_s_form(api: Any) -> None:
    missing, wrong = api.get("/v1/embeddings"), api.get("/v1/completions")
    slash = api.post("/v1/completions/", b"{}")

    assert (missing.status_code, slash.status_code, wrong.status_code) == (404, 404, 405)
    assert "/v1/completions/ is not served here" in api.error_of(slash)["message"]
    assert api.error_of(missing)["code"] == "unknown_url"
    assert "GET /openapi.json lists what is" in api.error_of(missing)["message"]
    assert wrong.headers["allow"] == "POST"
    assert "use POST" in api.error_of(wrong)["message"]


def test_more_than_the_queue_holds_is_refused_with_when_to_come_back(api: Any) -> None:
    api.engine.max_unfinished = 0

    response = api.complete()

    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert api.error_of(response)["code"] == "engine_overloaded"


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
    assert api.error_of(response)["message"] == "The worker failed; its log says why."
    assert response.headers["connection"] == "close"


def test_both_names_of_the_model_are_listed_and_served(api: Any) -> None:
    listed = api.get("/v1/models").json()

    assert [card["id"] for card in listed["data"]] == ["tiny", "tiny-v1"]
    assert {card["max_model_len"] for card in listed["data"]} == {256}
    assert api.get("/v1/models/tiny-v1").json()["object"] == "model"
    assert api.complete(model="tiny-v1").json()["model"] == "tiny-v1"


@pytest.fixture(scope="module")
def adapted(scripted_module: Any) -> Iterator[Any]:
    """A model with the adapters `terse` and `org/sql`."""
    with scripted_module.running(lora=("terse=/a", "org/sql=/b")) as server:
        yield server


def test_adapters_are_listed_with_their_parent(adapted: Any) -> None:
    cards = {card["id"]: card for card in adapted.get("/v1/models").json()["data"]}

    assert list(cards) == ["tiny", "tiny-v1", "terse", "org/sql"]
    assert [card.get("parent") for card in cards.values()] == [None, None, "tiny", "tiny"]
    assert "parent" not in cards["tiny"]
    assert adapted.get("/v1/models/org/sql").json() == cards["org/sql"]
    assert cards["terse"]["max_model_len"] == 256


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_a_request_by_an_adapter_s_name_is_computed_by_it(
    adapted: Any, path: str, body: Any
) -> None:
    adapted.engine.seen.clear()
    by_adapter = adapted.post(path, {"model": "org/sql", **body})
    asked = list(adapted.engine.seen)
    by_model = adapted.post(path, {"model": "tiny", **body})

    assert {request.adapter for request in asked} == {"org/sql"}
    assert {request.adapter for request in adapted.engine.seen[len(asked) :]} == {None}
    assert by_adapter.json()["model"] == by_adapter.headers["x-deepseek-model"] == "org/sql"
    assert by_model.json()["model"] == by_model.headers["x-deepseek-model"] == "tiny-v1"


def test_a_stream_names_its_adapter(adapted: Any) -> None:
    response = adapted.complete(model="terse", max_tokens=2, stream=True)

    assert {chunk["model"] for chunk in adapted.events(response)} == {"terse"}
    assert response.headers["x-deepseek-model"] == "terse"


def test_a_name_that_is_neither_model_nor_adapter_is_a_404(adapted: Any) -> None:
    response = adapted.complete(model="other")

    assert response.status_code == adapted.get("/v1/models/other").status_code == 404
    error = adapted.error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'other' does not exist here; 'tiny', 'terse', 'org/sql' do." in error["message"]


def test_texts_are_cut_into_tokens_under_an_adapter_s_name(adapted: Any) -> None:
    response = adapted.post("/tokenize", {"model": "terse", "prompt": "ab"})

    assert response.json()["tokens"] == [97, 98]


def test_a_fallback_says_that_it_is_one_and_what_it_cannot_do(scripted: Any) -> None:
    with scripted.running(instead_of="large-v1") as server:
        answer = server.complete(max_tokens=2)
        too_long = server.complete(max_tokens=10_000)
        adapter = server.complete(model="an-adapter")
        wrong = server.complete(temperature=-1)

    assert answer.headers["x-deepseek-model"] == answer.json()["model"] == "tiny-v1"
    assert answer.headers["x-deepseek-degraded"] == "large-v1"
    assert (too_long.status_code, adapter.status_code, wrong.status_code) == (400, 404, 400)
    for refused in (too_long, adapter):
        assert refused.headers["x-deepseek-degraded"] == "large-v1"
        message = refused.json()["error"]["message"]
        assert "The service is degraded: tiny-v1 answers instead of large-v1" in message
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert "degraded" not in wrong.json()["error"]["message"]


def test_names_beyond_ascii_are_served_and_percent_encoded_in_headers(scripted: Any) -> None:
    names = {"served_model_name": "模型", "model_id": "org/模型 2", "instead_of": "grösser"}
    with scripted.running(**names) as server:
        answers = [
            server.complete(model="模型", max_tokens=1),
            server.complete(model="模型", max_tokens=1, stream=True),
            server.complete(model="x"),
        ]

    assert [answer.status_code for answer in answers] == [200, 200, 404]
    for answer in answers:
        assert answer.headers["x-deepseek-model"] == "org/%E6%A8%A1%E5%9E%8B 2"
        assert answer.headers["x-deepseek-degraded"] == "gr%C3%B6sser"


def test_a_model_that_is_meant_says_nothing_of_degrading(api: Any) -> None:
    response = api.complete(max_tokens=10_000)

    assert "x-deepseek-degraded" not in response.headers
    assert "degraded" not in response.json()["error"]["message"]


def test_the_version_is_told(api: Any) -> None:
    assert api.get("/version").json().keys() == {"version"}


def test_keys_and_tokens_are_asked_for(scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-one\nsk-two\nschlüssel\n", "utf-8")
    (tmp_path / "token").write_text("state\n")
    files = {"api_key_file": tmp_path / "keys", "state_token_file": tmp_path / "token"}

    with scripted.running(**files) as server:
        bearer = {key: {"authorization": f"Bearer {key}"} for key in ("sk-two", "state", "x")}
        models = [
            server.get("/v1/models", headers=headers).status_code
            for headers in ({}, bearer["x"], bearer["state"], bearer["sk-two"])
        ]
        beyond_ascii = server.get(
            "/v1/models", headers={"authorization": "Bearer schlüssel".encode()}
        )
        completion = server.complete()
        state = [
            server.get("/state", headers=headers).status_code
            for headers in ({}, bearer["x"], bearer["sk-two"], bearer["state"])
        ]
        free = [server.get(path).status_code for path in ("/health/live", "/metrics", "/version")]

    assert models == [401, 401, 401, 200]
    assert beyond_ascii.status_code == 200
    assert completion.status_code == 401
    assert server.error_of(completion)["code"] == "invalid_api_key"
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
    assert "loading" in server.error_of(completion)["message"]
    assert completion.headers["retry-after"]


def test_a_worker_is_ready_only_after_its_own_first_answer(api: Any) -> None:
    api.worker.board.set(WARM, 0)
    cold = api.get("/health/ready")
    api.worker.board.set(WARM, 1)

    assert cold.status_code == 503
    assert "first request" in cold.json()["message"]
    assert api.get("/health/ready").status_code == 200


def test_an_engine_that_makes_no_progress_is_neither_live_nor_ready(
    scripted: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("state")
    with scripted.running(stall_seconds=0.3, state_token_file=tmp_path / "token") as server:
        server.engine.gate.clear()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.complete)
            server.wait_until(lambda: server.get("/health/live").status_code == 503)
            live, ready = server.get("/health/live"), server.get("/health/ready")
            state = server.get("/state", headers={"authorization": "Bearer state"}).json()

            server.engine.gate.set()

            assert answer.result().status_code == 200
        server.wait_until(lambda: server.get("/health/live").status_code == 200)

    assert "finished no step" in live.json()["message"]
    assert ready.status_code == 503
    assert state["is_stalled"]
    assert state["seconds_since_step"] > 0.3


@pytest.mark.parametrize(
    ("device", "given", "seconds"), [("cuda", None, 10), ("cpu", None, 60), ("cuda", 3.0, 3)]
)
def test_how_long_a_step_may_take_depends_on_the_device(
    api: Any, device: str, given: float | None, seconds: float
) -> None:
    worker = replace(
        api.worker,
        model=replace(api.worker.model, device=device),
        config=api.worker.config.model_copy(update={"stall_seconds": given}),
    )

    assert worker.stall_seconds == seconds


def test_an_idle_engine_is_live_however_long_it_idles(scripted: Any) -> None:
    # It gives a sign of life every second.
    with scripted.running(stall_seconds=3) as server:
        time.sleep(3.5)
        assert server.get("/health/live").status_code == 200


def test_an_engine_that_broke_fails_what_runs_and_says_so(scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("state")
    with scripted.running(state_token_file=tmp_path / "token") as server:
        server.engine.reply = lambda _: 1 / 0

        broken, later = server.complete(), server.complete()

        live = server.get("/health/live")
        state = server.get("/state", headers={"authorization": "Bearer state"}).json()

    assert (broken.status_code, later.status_code, live.status_code) == (503, 503, 503)
    assert "EngineFailed" in server.error_of(broken)["message"]
    assert (state["phase"], state["reason"]) == ("failed", "InternalError")
