"""Which differences between a manifest and the live object count."""

import copy
from typing import Any

import pytest

from deepseek_operator.drift import amount_of, applied_fields, deviations
from deepseek_operator.render import HASH_ANNOTATION

CASES = {
    "the same": ({"spec": {"a": 1}}, {"spec": {"a": 1}}, []),
    "a default that the server filled in": ({"spec": {"a": 1}}, {"spec": {"a": 1, "b": 2}}, []),
    "another value": ({"spec": {"a": 1}}, {"spec": {"a": 2}}, ["spec.a=2"]),
    "a field that is gone": ({"spec": {"a": 1}}, {"spec": {}}, ["spec.a=∅"]),
    "a part that is gone": ({"spec": {"a": 1}}, {}, ["spec=∅"]),
    "an empty value that the server dropped": ({"spec": {"a": {}, "b": False}}, {"spec": {}}, []),
    "false that became true": ({"spec": {"a": False}}, {"spec": {"a": True}}, ["spec.a=True"]),
    "status is not ours": ({"status": {"a": 1}}, {"status": {"a": 2}}, []),
    "an annotation of somebody else": (
        {"metadata": {"annotations": {"a": "1"}}},
        {"metadata": {"annotations": {"a": "1", "b": "2"}}},
        [],
    ),
    "a key added to a selector": (
        {"spec": {"selector": {"a": "b"}}},
        {"spec": {"selector": {"a": "b", "c": "d"}}},
        ["spec.selector={'a': 'b', 'c': 'd'}"],
    ),
    "a container of somebody else": (
        {"spec": {"containers": [{"name": "a", "image": "x"}]}},
        {"spec": {"containers": [{"name": "b"}, {"name": "a", "image": "x"}]}},
        [],
    ),
    "another image": (
        {"spec": {"containers": [{"name": "a", "image": "x"}]}},
        {"spec": {"containers": [{"name": "a", "image": "y"}]}},
        ["spec.containers[a].image='y'"],
    ),
    "our container is gone": (
        {"spec": {"containers": [{"name": "a"}]}},
        {"spec": {"containers": [{"name": "b"}]}},
        ["spec.containers[a]=∅"],
    ),
    "an argument added": (
        {"spec": {"args": ["a"]}}, {"spec": {"args": ["a", "b"]}}, ["spec.args=['a', 'b']"],
    ),
    "arguments in another order": (
        {"spec": {"args": ["a", "b"]}},
        {"spec": {"args": ["b", "a"]}},
        ["spec.args[0]='b'", "spec.args[1]='a'"],
    ),
    "a rule added to a policy": (
        {"spec": {"ingress": [{}]}}, {"spec": {"ingress": [{}, {}]}}, ["spec.ingress=[{}, {}]"],
    ),
    "an amount written in another way": (
        {"resources": {"limits": {"cpu": "1000m", "memory": "0.5Gi"}}},
        {"resources": {"limits": {"cpu": "1", "memory": "512Mi"}}},
        [],
    ),
    "another amount": (
        {"resources": {"limits": {"cpu": "1000m"}}},
        {"resources": {"limits": {"cpu": "2"}}},
        ["resources.limits.cpu='2'"],
    ),
    "an amount that is none": (
        {"resources": {"limits": {"cpu": "1"}}},
        {"resources": {"limits": {"cpu": "many"}}},
        ["resources.limits.cpu='many'"],
    ),
    "text that looks like an amount elsewhere": (
        {"spec": {"value": "1000m"}}, {"spec": {"value": "1"}}, ["spec.value='1'"],
    ),
    "a version to apply on is no wish": (
        {"metadata": {"resourceVersion": "3"}}, {"metadata": {"resourceVersion": "4"}}, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("desired", "live", "found"), CASES.values(), ids=CASES)
def test_what_has_drifted(desired: dict, live: dict, found: list[str]) -> None:
    assert list(deviations(desired, live)) == found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", 1), ("1k", "1000"), ("1Ti", "1024Gi"), ("100m", "0.1"), ("2M", 2e6),
        ("1P", "1000T"), ("9E", "9000P"), ("1Pi", "1024Ti"), ("7Ei", "7168Pi"),
        ("1500u", "1.5m"), ("1n", "1e-9"), ("5e3", "5k"), ("5E3", "5k"),
    ],
)  # fmt: skip
def test_amounts_are_compared_by_what_they_amount_to(one: object, other: object) -> None:
    assert amount_of(one) == amount_of(other)


POD = {
    "nodeSelector": {"a": "b"},
    "containers": [
        {"name": "w", "image": "x", "args": ["a"], "ports": [{"containerPort": 1}], "env": [
            {"name": "A", "value": "1"},
        ]},
    ],
}  # fmt: skip
APPLIED = {
    "f:nodeSelector": {},
    "f:containers": {
        'k:{"name":"w"}': {
            ".": {},
            "f:name": {},
            "f:image": {},
            "f:args": {},
            "f:ports": {'k:{"containerPort":1,"protocol":"TCP"}': {".": {}, "f:containerPort": {}}},
            "f:env": {'k:{"name":"A"}': {".": {}, "f:name": {}, "f:value": {}}},
        },
    },
}


def without(*path: str) -> dict[str, Any]:
    """What was applied without a field that somebody else changed."""
    fields = copy.deepcopy(APPLIED)
    at: Any = fields
    for part in path[:-1]:
        at = at[part]
    del at[path[-1]]
    return fields


WORKER = ("f:containers", 'k:{"name":"w"}')
MADE = {
    "a value": ({"image": "mirror/x"}, ("f:image",), "image='mirror/x'"),
    "a list that is one value": ({"args": ["z"]}, ("f:args",), "args[0]='z'"),
    "a longer one": ({"args": ["a", "z"]}, ("f:args",), "args=['a', 'z']"),
    "a field that is gone": ({"image": None}, ("f:image",), "image=∅"),
    "an item that is gone": ({"env": []}, ("f:env", 'k:{"name":"A"}'), "env[A]=∅"),
    "a part of an item": (
        {"env": [{"name": "A", "value": "2"}]},
        ("f:env", 'k:{"name":"A"}', "f:value"),
        "env[A].value='2'",
    ),
}


@pytest.mark.parametrize(("change", "field", "found"), MADE.values(), ids=MADE)
def test_what_admission_made_of_what_was_applied_is_told_from_what_somebody_changed(
    change: dict[str, Any], field: tuple[str, ...], found: str
) -> None:
    live = copy.deepcopy(POD)
    live["containers"][0] |= change

    assert deviations(POD, live, APPLIED) == ()
    assert deviations(POD, live, without(*WORKER, *field)) == (f"containers[w].{found}",)


def test_a_whole_map_that_admission_changed() -> None:
    live = POD | {"nodeSelector": {"a": "c"}}

    assert deviations(POD, live, APPLIED) == ()
    assert deviations(POD, live, without("f:nodeSelector")) == ("nodeSelector={'a': 'c'}",)


def test_of_items_without_a_name_nobody_knows_who_changed_them() -> None:
    live = copy.deepcopy(POD)
    live["containers"][0]["ports"] = [{"containerPort": 2}]

    assert deviations(POD, live, APPLIED) == ("containers[w].ports[0].containerPort=2",)


def test_only_what_came_of_this_very_manifest_counts_as_applied() -> None:
    def manifest(text: str) -> dict[str, Any]:
        return {"metadata": {"annotations": {HASH_ANNOTATION: text}}}

    told = {"appliedFields": '{"f:spec":{}}'}

    assert applied_fields(manifest("a"), manifest("a") | told) == {"f:spec": {}}
    assert applied_fields(manifest("a"), manifest("b") | told) is None
    assert applied_fields(manifest("a"), manifest("a")) is None
    assert applied_fields({"metadata": {}}, {"metadata": {}} | told) is None


def test_text_that_is_no_amount_is_refused() -> None:
    with pytest.raises(ValueError, match="many"):
        amount_of("many")
