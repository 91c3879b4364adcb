"""What becomes of texts, tokens and conversations, and what does not fit."""

import threading
from typing import Any

import pytest

USER = [{"role": "user", "content": "hello"}]


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


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[], [1]], ["a", ""]])
def test_an_empty_prompt_is_refused_alone(api: Any, prompt: Any) -> None:
    response = api.complete(prompt=prompt)

    assert response.status_code == 400
    assert api.error_of(response)["param"].startswith("prompt")
    assert "empty" in api.error_of(response)["message"]
    assert api.engine.seen == []
    assert api.complete().status_code == 200


@pytest.mark.parametrize(("size", "wanted"), [(256, 1), (257, 1), (200, 57), (5, 10**9), (300, 16)])
def test_prompt_and_answer_beyond_the_context_are_refused_with_the_numbers(
    api: Any, size: int, wanted: int
) -> None:
    response = api.complete(prompt="x" * size, max_tokens=wanted)

    error = api.error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    for number in (256, size + wanted, size, wanted):
        assert str(number) in error["message"]


def test_prompt_and_answer_that_just_fit_are_served(api: Any) -> None:
    assert api.complete(prompt="x" * 200, max_tokens=56).status_code == 200
    assert api.complete(prompt="x" * 256, max_tokens=0).status_code == 200
    assert api.complete(prompt="x" * 256).status_code == 400


def test_a_conversation_that_the_template_refuses_is_the_client_s_error(api: Any) -> None:
    response = api.chat(messages=USER * 2)

    assert response.status_code == 400
    assert "roles must alternate" in api.error_of(response)["message"]


@pytest.mark.parametrize(
    "name", ["self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token"]
)
def test_template_options_cannot_replace_the_request(api: Any, name: str) -> None:
    response = api.chat(chat_template_kwargs={name: 1})

    assert (response.status_code, api.error_of(response)["param"]) == (400, "chat_template_kwargs")


def test_tokens_that_the_model_does_not_have_are_refused(api: Any) -> None:
    response = api.complete(prompt=[1, 257])

    assert (response.status_code, api.error_of(response)["param"]) == (400, "prompt[1]")


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
