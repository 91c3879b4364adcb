"""Tokens of texts and texts of tokens."""

from typing import Any

import pytest


def test_a_text_is_cut_into_tokens_and_put_together_again(api: Any) -> None:
    cut = api.post("/tokenize", {"model": "tiny", "prompt": "hé", "return_token_strs": True})

    assert cut.json() == {
        "count": 3,
        "max_model_len": 256,
        "tokens": list("hé".encode()),
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert api.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    back = api.post("/detokenize", {"model": "tiny-v1", "tokens": cut.json()["tokens"]})
    assert back.json() == {"prompt": "hé"}
    assert api.post("/detokenize", {"tokens": [104, 256]}).json() == {"prompt": "h<end>"}


def test_a_chat_has_the_tokens_that_an_answer_would_begin_with(api: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]

    cut = api.post("/tokenize", {"messages": messages}).json()

    api.chat(max_tokens=1)
    assert cut["tokens"] == list(api.engine.seen[-1].prompt_token_ids)
    assert cut["token_strs"] is None
    bare = api.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert bytes(bare["tokens"]) == b"<user>hello\n"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("/tokenize", {}, 400, "prompt", "either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt", "either"),
        ("/tokenize", {"messages": []}, 400, "messages", "it is empty"),
        ("/tokenize", {"prompt": 3}, 400, "prompt", "got 3"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model", "does not exist"),
        ("/detokenize", {"tokens": [1, 257]}, 400, "tokens[1]", "no token 257"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens", 'got "a"'),
        ("/detokenize", {}, 400, "tokens", "Missing required parameter"),
    ],
)
def test_wrong_bodies_are_refused(
    api: Any, path: str, body: Any, status: int, param: str, says: str
) -> None:
    response = api.post(path, body)

    assert response.status_code == status
    assert api.error_of(response)["param"] == param
    assert says in api.error_of(response)["message"]
