"""The static tables: every one covers every size, and the first bucket that fits is taken."""

import json
from importlib import resources

import pytest

from deepseek_kernels import _configs
from deepseek_kernels._configs import Bucket, pick, table

TABLES = sorted(
    entry.name.removesuffix(".json")
    for entry in resources.files("deepseek_kernels").joinpath("configs").iterdir()
    if entry.name.endswith(".json")
)


@pytest.mark.parametrize("op", TABLES)
def test_every_table_covers_every_size(op):
    assert table(op)[-1].limits == {}


@pytest.mark.parametrize("op", TABLES)
def test_no_bucket_is_hidden_by_one_before_it(op):
    buckets = table(op)

    for index, bucket in enumerate(buckets):
        for earlier in buckets[:index]:
            covered = all(
                name in bucket.limits and bucket.limits[name] <= limit
                for name, limit in earlier.limits.items()
            )
            assert not covered, f"{bucket.limits} is never reached after {earlier.limits}"


def test_the_first_bucket_that_holds_the_sizes_decides(monkeypatch):
    monkeypatch.setattr(
        _configs,
        "table",
        lambda _: (
            Bucket({"m": 16, "n": 4096}, {"block": 1}),
            Bucket({"m": 16}, {"block": 2}),
            Bucket({}, {"block": 3}),
        ),
    )
    _configs._pick.cache_clear()

    assert pick("example", m=16, n=4096) == {"block": 1}
    assert pick("example", m=1, n=4097) == {"block": 2}
    assert pick("example", m=17, n=1) == {"block": 3}
    _configs._pick.cache_clear()


def test_a_table_without_a_last_resort_is_refused(monkeypatch, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "example.json").write_text(
        json.dumps({"buckets": [{"limits": {"m": 1}, "config": {}}]})
    )
    monkeypatch.setattr(_configs.resources, "files", lambda _: tmp_path)

    with pytest.raises(ValueError, match="must end with a bucket whose limits are empty"):
        table("example")
