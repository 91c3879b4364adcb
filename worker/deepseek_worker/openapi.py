"""The API as an OpenAPI document, made of the types that read and write the bodies. Pure.

`GET /openapi.json` serves it, and `docs/reference/openapi.json` is the same.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from deepseek_worker.answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorBody,
    ModelCard,
    ModelList,
    Tokenized,
)
from deepseek_worker.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from deepseek_worker.responses import ResponsesRequest

Schema = dict[str, Any]
# The bodies of /v1/responses have a form for each kind of item, which OpenAI's clients know.
RESPONSE: Schema = {
    "type": "object",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "status": {"enum": ["completed", "incomplete"]},
        "model": {"type": "string"},
        "output": {"type": "array", "items": {"type": "object", "required": ["id", "type"]}},
        "usage": {"type": "object", "required": ["input_tokens", "output_tokens", "total_tokens"]},
    },
}
EVENT: Schema = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
HEALTH: Schema = {
    "type": "object",
    "required": ["ok", "phase", "message"],
    "properties": {
        "ok": {"type": "boolean"},
        "phase": {"type": "string"},
        "message": {"type": "string"},
        "loading_progress": {"type": "number"},
        "seconds_since_step": {"type": "number"},
    },
}
REFUSALS = {
    400: "The request is wrong; `error.param` names the field.",
    401: "No API key, or a wrong one.",
    404: "No such model here.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to ask again.",
    500: "The answer failed.",
    503: "Loading, shutting down or out of memory; `Retry-After` says when to ask again.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | Schema | None
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    needs_key: bool = True


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Continue a conversation",
        ChatCompletion,
        ChatRequest,
        streams=True,
    ),
    Operation(
        "post", "/v1/completions", "Continue texts", Completion, CompletionRequest, streams=True
    ),
    Operation(
        "post",
        "/v1/responses",
        "Continue a conversation, by items",
        RESPONSE,
        ResponsesRequest,
        streams=True,
    ),
    Operation("post", "/tokenize", "Cut a text into tokens", Tokenized, TokenizeRequest),
    Operation("post", "/detokenize", "Put tokens together", Detokenized, DetokenizeRequest),
    Operation("get", "/v1/models", "List the names that requests may ask for", ModelList),
    Operation("get", "/v1/models/{name}", "Describe one of them", ModelCard),
    Operation("get", "/health/live", "Whether the worker works", HEALTH, needs_key=False),
    Operation("get", "/health/ready", "Whether it answers", HEALTH, needs_key=False),
    Operation("get", "/metrics", "Counts for Prometheus", None, needs_key=False),
    Operation("get", "/version", "The worker's version", {"type": "object"}, needs_key=False),
)


@cache
def document() -> Schema:
    """The OpenAPI 3.1 document."""
    types: list[type] = [ErrorBody]
    for operation in OPERATIONS:
        types += [t for t in (operation.answer, operation.body) if isinstance(t, type)]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    refs: dict[type, Schema] = dict(zip(types, schemas, strict=True))
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "DeepSeek worker",
            "version": "1",
            "description": "OpenAI's API; what differs is in docs/api.md.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, refs: dict[type, Schema]) -> Schema:
    error = {"application/json": {"schema": refs[ErrorBody]}}
    described: Schema = {
        "summary": operation.summary,
        "operationId": operation.path.strip("/").replace("/", "_").replace("{name}", "one"),
        "responses": {"200": {"description": "The answer.", "content": _answer(operation, refs)}},
    }
    if "{name}" in operation.path:
        described["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[operation.body]}},
        }
    if operation.needs_key:
        described["security"] = [{"key": []}, {}]
        for status, meaning in REFUSALS.items():
            if operation.body is not None or status in (401, 404):
                described["responses"][str(status)] = {"description": meaning, "content": error}
    elif operation.answer is HEALTH:
        content = {"application/json": {"schema": HEALTH}}
        described["responses"]["503"] = {"description": "It does not.", "content": content}
    return described


def _answer(operation: Operation, refs: dict[type, Schema]) -> Schema:
    answer = operation.answer
    if answer is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    schema = answer if isinstance(answer, dict) else refs[answer]
    content: Schema = {"application/json": {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {"schema": EVENT}
    return content
