"""The patterns mean the same to Python's, Rust's and Go's regular expressions."""

import re

import pytest
from pydantic import TypeAdapter, ValidationError

from deepseek_contract import text

PATTERNS = [text.LABEL, text.SUBDOMAIN, text.QUALIFIED_NAME, text.FILE_PATH, text.IMAGE]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_use_only_what_every_engine_reads_alike(pattern: str) -> None:
    assert not re.search(r"\\[dswbDSWB]|\(\?", pattern)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("LabelName", ["a", "a-1", "1"], ["", "-a", "a-", "A", "a.b", "a" * 64]),
        ("ObjectName", ["a", "a.b-c"], ["", "a..b", ".a", "A", "a" * 254]),
        (
            "QualifiedName",
            ["a", "A_b.c", "x.example/Y", f"{'p' * 253}/{'n' * 63}"],
            ["", "/a", "a/", "a/b/c", "A.example/b c", f"{'p' * 254}/n", f"p/{'n' * 64}"],
        ),
        ("LabelValue", ["", "a", "A_b.c-1"], ["-", "a-", "a/b", "a" * 64]),
        (
            "DataKey",
            ["ca.crt", "api-key", "_x", ".env", "a..b"],
            ["", "a/b", "a b", ".", "..", "..a"],
        ),
        (
            "ImageName",
            ["worker", "localhost/worker:dev", "r.example:5000/a/b__c:V1@sha256:" + "0" * 64],
            ["", "r.example/Worker", "a b", "worker:", "worker@sha256:00", "https://worker"],
        ),
        ("VariableName", ["A", "_a1"], ["", "1A", "A-B", "A.B"]),
    ],
)
def test_each_kind_of_text_takes_what_kubernetes_takes(
    kind: str, right: list[str], wrong: list[str]
) -> None:
    adapter: TypeAdapter[str] = TypeAdapter(getattr(text, kind))
    for value in right:
        assert adapter.validate_python(value) == value
    for value in wrong:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)
