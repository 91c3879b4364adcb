"""The text of `spec.model.source`, taken apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_contract.source import (
    PATTERN,
    HttpsSource,
    HubSource,
    NodePathSource,
    OciSource,
    PackageSource,
    PvcSource,
    Source,
    is_source,
    parse_source,
)

SHA256 = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("package://smollm2", PackageSource("smollm2")),
        ("oci://localhost:5000/r1:v1", OciSource("localhost:5000/r1:v1", None)),
        ("oci://example.com/r1:v1#path=models/r1", OciSource("example.com/r1:v1", "models/r1")),
        (f"oci://r1@sha256:{SHA256}", OciSource(f"r1@sha256:{SHA256}", None)),
        ("pvc://models", PvcSource("models", None)),
        ("pvc://models/r1/model.gguf", PvcSource("models", "r1/model.gguf")),
        ("hf://org/name", HubSource("org/name", None)),
        ("hf://org/name@refs/pr/1", HubSource("org/name", "refs/pr/1")),
        (f"https://h:8443/f?a=b#sha256={SHA256}", HttpsSource("https://h:8443/f?a=b", SHA256)),
        ("nodePath:///data/r1", NodePathSource("/data/r1")),
    ],
)
def test_each_form_is_taken_apart(text: str, source: Source) -> None:
    assert parse_source(text) == source
    assert is_source(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "smollm2",
        "s3://bucket/key",
        "package://",
        "pvc:///r1",
        "pvc://models/../r1",
        "pvc://models/",
        "hf://org",
        "hf://org/name/more",
        "https://h/f",
        "https://h/f#sha256=00",
        f"https://user@h/f#sha256={SHA256}",
        "nodePath://data",
        "nodePath:///data/../etc",
        "package://smollm2\n",
    ],
)
def test_what_has_no_form_is_refused_with_all_forms(text: str) -> None:
    assert not is_source(text)
    with pytest.raises(ValueError, match="is no source of a model; allowed are package://NAME"):
        parse_source(text)


@given(st.from_regex(PATTERN, fullmatch=True))
def test_whatever_the_schema_lets_through_can_be_taken_apart(text: str) -> None:
    parse_source(text)
