"""Which differences between a manifest and the live object count."""

import pytest

from deepseek_operator.drift import amount_of, deviations

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


def test_text_that_is_no_amount_is_refused() -> None:
    with pytest.raises(ValueError, match="many"):
        amount_of("many")
