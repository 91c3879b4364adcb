"""schemathesis against the published document: no body makes the server fail, and its answers are
as the document says."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from deepseek_worker.openapi import document

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# With the tests that take a while; the engine follows a script here too.
pytestmark = pytest.mark.model
schema = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def address(scripted_module: Any) -> Iterator[str]:
    with scripted_module.running() as server:
        server.engine.reply = lambda _: b"yes"
        yield server.url


@pytest.mark.timeout(300)
@schema.parametrize()
@settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_the_document_says(case: Any, address: str) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        # Else every request would only learn that there is no such model.
        case.body["model"] = "tiny"
    case.call_and_validate(base_url=address, checks=CHECKS, timeout=20)
