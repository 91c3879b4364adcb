"""What is added to a plan in the making."""

import copy

import pytest
from scenes import NOW, Simulation

from deepseek_operator.draft import Draft
from deepseek_operator.kinds import Manifest, Reference
from deepseek_operator.observed import Observed
from deepseek_operator.render import desired_state
from deepseek_operator.tiers import tiers_of

SERVICE = Reference("Service", "team", "chat")


def settled() -> tuple[Observed, Manifest]:
    """An object that is as it should be, and the Service that it wants."""
    cluster = Simulation()
    cluster.settle()
    observed = cluster.observed()
    wanted = desired_state(
        observed.identity, cluster.spec, cluster.settings, tiers_of(cluster.spec)
    )
    return observed, next(manifest for manifest in wanted if manifest["kind"] == "Service")


def written(draft: Draft) -> tuple[int, int, int]:
    return len(draft.to_apply), len(draft.to_create), len(draft.to_delete)


def test_what_is_there_as_wanted_is_not_written() -> None:
    observed, service = settled()
    draft = Draft(observed)

    draft.ensure(service, observed.children)

    assert written(draft) == (0, 0, 0)
    assert not draft.reasons


@pytest.mark.parametrize(
    ("kind", "writes"), [("Service", (1, 0, 0)), ("ServiceAccount", (0, 1, 0))]
)
def test_what_is_missing_is_applied_unless_it_may_be_somebody_elses(
    kind: str, writes: tuple[int, int, int]
) -> None:
    observed, service = settled()
    draft = Draft(observed)

    draft.ensure({**service, "kind": kind}, {})

    assert written(draft) == writes
    assert draft.reasons == [f"{kind} chat is missing"]


def test_what_differs_is_applied_and_the_reason_names_the_field() -> None:
    observed, service = settled()
    service = copy.deepcopy(service)
    service["spec"]["type"] = "NodePort"
    draft = Draft(observed)

    draft.ensure(service, observed.children)

    assert written(draft) == (1, 0, 0)
    assert draft.reasons[0].startswith("Service chat differs: ")
    assert "spec.type" in draft.reasons[0]


def test_what_is_being_deleted_is_left_alone() -> None:
    observed, service = settled()
    observed.children[SERVICE]["metadata"]["deletionTimestamp"] = NOW.isoformat()
    draft = Draft(observed)

    draft.ensure({**service, "spec": {}}, observed.children)

    assert written(draft) == (0, 0, 0)


def test_the_earliest_wish_to_look_again_counts() -> None:
    draft = Draft(settled()[0])

    draft.look_again(15)
    draft.look_again(5)
    draft.look_again(10)

    assert draft.again_seconds == 5
