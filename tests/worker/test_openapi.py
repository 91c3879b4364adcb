"""The OpenAPI document says what is served."""

import json
import re
from typing import Any

from deepseek_worker.openai import ChatRequest, CompletionRequest
from deepseek_worker.openapi import document
from deepseek_worker.server import Api

UNDOCUMENTED = {"/state", "/openapi.json"}


def test_every_route_is_described_and_no_other() -> None:
    application = Api(None).application()  # type: ignore[arg-type] - nothing is asked of it

    routes = {re.sub(r":\w+}", "}", route.path) for route in application.routes}  # type: ignore

    assert routes - UNDOCUMENTED == document()["paths"].keys()


def test_every_field_that_may_be_sent_is_described() -> None:
    schemas = document()["components"]["schemas"]

    for kind in (ChatRequest, CompletionRequest):
        assert schemas[kind.__name__]["properties"].keys() == set(kind.__struct_fields__)
        assert schemas[kind.__name__]["additionalProperties"] is False


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(document())

    names = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text))
    assert names <= document()["components"]["schemas"].keys()
    assert len(names) > 20


def test_every_operation_has_an_answer_and_its_refusals() -> None:
    operations: list[dict[str, Any]] = [
        operation for path in document()["paths"].values() for operation in path.values()
    ]

    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for operation in operations:
        assert operation["responses"]["200"]["content"]
        if "requestBody" in operation:
            assert {"400", "401", "404", "413", "429", "503"} <= operation["responses"].keys()
