"""Where pods may run; test_pod tries every value in a real Deployment."""

import pytest
from pydantic import ValidationError

from deepseek_contract.placement import Affinity, LabelSelector, NodeRequirement, Toleration


def test_affinity_comes_out_as_it_was_written() -> None:
    written = {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 50,
                    "preference": {
                        "matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}],
                        "matchFields": [
                            {"key": "metadata.name", "operator": "In", "values": ["node1"]}
                        ],
                    },
                }
            ]
        }
    }

    assert Affinity.parse(written).document() == written


def test_a_toleration_compares_for_equality_unless_told() -> None:
    assert Toleration.parse({"key": "a", "value": "b"}).operator == "Equal"


@pytest.mark.parametrize("values", [None, [], ["a"], ["1", "2"]])
def test_comparing_takes_one_whole_number(values: list[str] | None) -> None:
    with pytest.raises(ValidationError, match="need"):
        NodeRequirement.parse({"key": "cores", "operator": "Gt", "values": values})


@pytest.mark.parametrize(
    "key", ["", "a b", "A.example/x", f"a.example/{'x' * 64}", f"{'p' * 254}/x"]
)
def test_what_is_no_label_cannot_be_selected_by(key: str) -> None:
    with pytest.raises(ValidationError, match="matchLabels may only name labels, with at most 253"):
        LabelSelector.parse({"matchLabels": {key: "x"}})
