"""`POST /tokenize` and `POST /detokenize`: what a text costs, and what tokens say. Pure."""

import msgspec

from deepseek_worker.answers import Detokenized, Tokenized
from deepseek_worker.errors import InvalidRequest
from deepseek_worker.openai import ChatRequest, DetokenizeRequest, Message, TokenizeRequest
from deepseek_worker.prompts import Model, encode_chat
from deepseek_worker.validation import check_chat, check_token_ids, decode

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Read the body of `POST /tokenize`.

    Raises:
        InvalidRequest: with the field, what was given and what is allowed.
    """
    request = decode(_tokenize_decoder, body)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest(
            "Give either 'prompt' or 'messages'.", "prompt", "missing_required_parameter"
        )
    if request.messages is not None:
        check_chat(_chat(request, request.messages))
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Read the body of `POST /detokenize`.

    Raises:
        InvalidRequest: with the field, what was given and what is allowed.
    """
    return decode(_detokenize_decoder, body)


def tokenize(model: Model, asked: TokenizeRequest) -> Tokenized:
    """The tokens, as a request for an answer would have them.

    Raises:
        TemplateError: the template is missing or refuses the messages.
    """
    if asked.messages is not None:
        token_ids = encode_chat(model, _chat(asked, asked.messages)).token_ids
    else:
        text = asked.prompt or ""
        encode = model.tokenizer.encode
        token_ids = tuple(encode(text, add_special_tokens=asked.add_special_tokens))
    texts = [model.texts.text(token) for token in token_ids] if asked.return_token_strs else None
    return Tokenized(len(token_ids), model.max_context_tokens, token_ids, texts)


def detokenize(model: Model, asked: DetokenizeRequest) -> Detokenized:
    """The text; bytes that are no text are replaced.

    Raises:
        InvalidRequest: a token that the model does not have.
    """
    check_token_ids(tuple(asked.tokens), model.vocab_size, "tokens")
    data = b"".join(map(model.tokenizer.token_bytes, asked.tokens))
    return Detokenized(data.decode(errors="replace"))


def _chat(asked: TokenizeRequest, messages: list[Message]) -> ChatRequest:
    return ChatRequest(
        model=asked.model or "",
        messages=messages,
        tools=asked.tools,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
