"""Amounts of resources as text."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_contract.quantity import PATTERN, amount


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (5, 5),
        ("2", 2),
        ("500m", Fraction(1, 2)),
        ("0.5", Fraction(1, 2)),
        ("1.5Gi", 3 * 2**29),
        ("1k", 1000),
        ("1Ki", 1024),
        ("999Ti", 999 * 2**40),
        ("2T", 2 * 10**12),
    ],
)
def test_an_amount_is_exact(quantity: int | str, value: Fraction) -> None:
    assert amount(quantity) == value


@pytest.mark.parametrize(
    "text",
    [
        "banana",
        "",
        "10 GiB",
        "1e3",
        "-1Gi",
        ".5",
        "1Ki1",
        "0",
        "1.5.1",
        "9999999999Ti",
        "1\n",
        "5Ei",
    ],
)
def test_what_is_no_amount_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount above zero"):
        amount(text)


@given(st.from_regex(PATTERN, fullmatch=True))
def test_every_amount_is_above_zero_and_below_what_kubernetes_counts(text: str) -> None:
    assert 0 < amount(text) < 2**63
