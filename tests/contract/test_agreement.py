"""pydantic and the real API server accept and default the same documents.

Documents are made from the CRD itself, in two ways: one place at a time, with values on and beside
each limit, and at random, which meets the rules over several fields. Agreement is meant under
strict field validation, with null for absent. Whole numbers are written as such: what kubectl reads
as 3.0 it sends as 3, and a server that is sent 3.0 itself refuses it in some fields.
"""

import copy
from typing import Any

import pytest
from crd_documents import RARE, Document, Schema, specs, variations
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import ValidationError

import crds
from deepseek_contract.deployment import NOT_YET, DeepSeekDeployment
from deepseek_contract.schema import ApiModel

# Some thousand documents, each asked of a server that shares the machine.
pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(600)]


def without_refusals(model: type[ApiModel], *messages: str) -> type[ApiModel]:
    """The kind as it will be once everything in it exists."""
    rules = tuple(rule for rule in model.rules if rule.message not in messages)
    return type(model.__name__, (model,), {"rules": rules, "__module__": __name__})


COMPLETE_DEPLOYMENT = without_refusals(DeepSeekDeployment, *(row.rule().message for row in NOT_YET))


class Comparison:
    """Asks both about a document, and counts the accepted ones."""

    def __init__(
        self, server: Any, resource: crds.CustomResource, group: str, definition: Document
    ) -> None:
        version = definition["spec"]["versions"][0]
        self.schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        namespace = "/namespaces/default" if resource.scope == "Namespaced" else ""
        self.path = f"/apis/{group}/v1alpha1{namespace}/{resource.plural}"
        self.api_version = f"{group}/v1alpha1"
        self.server = server
        self.resource = resource
        self.num_accepted = 0
        server.install(definition)

    def disagreement(self, holder: Document) -> str | None:
        """What the two see differently, or None."""
        document = {"kind": self.resource.kind, "metadata": {"name": "drawn"}} | copy.deepcopy(
            holder
        )
        here: Document | None = None
        complaint = ""
        try:
            parsed = self.resource.model.parse(
                {"apiVersion": "deepseek.dev/v1alpha1"} | copy.deepcopy(document)
            )
            here = parsed.document()["spec"]
        except ValidationError as error:
            complaint = str(error)
        answer = self.server.create(self.path, {"apiVersion": self.api_version} | document)
        there = answer.body["spec"] if answer.is_accepted else None
        if here == there:
            self.num_accepted += here is not None
            return None
        return f"pydantic: {here or complaint}\nAPI server: {there or answer.message}"


def comparison(server: Any, resource: crds.CustomResource, group: str) -> Comparison:
    definition = crds.custom_resource_definition(resource, group=group)
    return Comparison(server, resource, group, definition)


def agree(
    both: Comparison, num_examples: int, least_accepted: int, rare: frozenset[str] = frozenset()
) -> None:
    @settings(
        max_examples=num_examples,
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs(both.schema, rare))
    def holds(holder: Document) -> None:
        difference = both.disagreement(holder)
        assert difference is None, f"{holder}\n{difference}"

    holds()
    assert both.num_accepted >= least_accepted, "too few right documents to mean anything"


def replaced(resource: crds.CustomResource, model: type[ApiModel]) -> crds.CustomResource:
    return crds.CustomResource(**{**vars(resource), "model": model})


def disagreements(both: Comparison, limit: int) -> list[str]:
    """What the two see differently, of all variations, up to a number of them."""
    found = []
    for spec in variations(both.schema, "spec"):
        difference = both.disagreement({"spec": spec})
        if difference is not None:
            found.append(f"{spec}\n{difference}")
            if len(found) == limit:
                break
    return found


COMPLETE = {
    "deployment": replaced(crds.DEPLOYMENT, COMPLETE_DEPLOYMENT),
    "tenant": crds.TENANT,
}


@pytest.mark.parametrize("kind", COMPLETE)
def test_both_see_each_place_alike(api_server: Any, kind: str) -> None:
    both = comparison(api_server, COMPLETE[kind], "complete.example")

    assert disagreements(both, limit=20) == []
    assert both.num_accepted > 30


@pytest.mark.parametrize("kind", COMPLETE)
def test_both_see_documents_at_random_alike(api_server: Any, kind: str) -> None:
    agree(comparison(api_server, COMPLETE[kind], "complete.example"), 300, least_accepted=60)


def test_both_see_documents_of_this_version_alike(api_server: Any) -> None:
    both = comparison(api_server, crds.DEPLOYMENT, "deepseek.dev")

    agree(both, 300, least_accepted=60, rare=RARE)


def drop_rule(spec: Schema) -> None:
    del spec["properties"]["gpu"]["x-kubernetes-validations"][0]


def drop_source_rule(spec: Schema) -> None:
    del spec["properties"]["model"]["x-kubernetes-validations"][0]


def raise_maximum(spec: Schema) -> None:
    spec["properties"]["gpu"]["properties"]["memoryLimitPercent"]["maximum"] = 1000


def change_default(spec: Schema) -> None:
    spec["properties"]["rollout"]["default"] = "surge"


def drop_default(spec: Schema) -> None:
    del spec["properties"]["recovery"]["default"]


def forget_enum_value(spec: Schema) -> None:
    spec["properties"]["gpu"]["properties"]["mode"]["enum"].remove("cpu")


def allow_unknown_fields(spec: Schema) -> None:
    spec["properties"]["gpu"]["x-kubernetes-preserve-unknown-fields"] = True


def forget_key(spec: Schema) -> None:
    env = spec["properties"]["pod"]["properties"]["env"]
    env["items"]["required"] = ["name", "value"]


@pytest.mark.parametrize(
    "mutate",
    [
        drop_rule,
        drop_source_rule,
        raise_maximum,
        change_default,
        drop_default,
        forget_enum_value,
        allow_unknown_fields,
        forget_key,
    ],
)
def test_a_crd_that_says_something_else_is_noticed(api_server: Any, mutate: Any) -> None:
    resource = COMPLETE["deployment"]
    group = f"{mutate.__name__.replace('_', '-')}.example"
    definition = crds.custom_resource_definition(resource, group=group)
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    mutate(schema["properties"]["spec"])
    wrong = Comparison(api_server, resource, group, definition)
    wrong.schema = comparison(api_server, resource, "complete.example").schema

    assert disagreements(wrong, limit=1) != []
