"""The tuner needs a GPU to measure; what it may write is checked without one."""

import pytest
import torch

from deepseek_kernels import tuning


@pytest.mark.parametrize("op", tuning.spaces())
def test_spaces_make_tables_that_cover_every_size(op):
    space = tuning.spaces()[op]

    assert space.buckets[-1] == {}
    for bucket in space.buckets:
        assert 1 <= len(space.candidates(bucket)) <= 12


def test_every_table_has_a_tuner_that_makes_its_buckets():
    assert set(tuning.spaces()) == {path.stem for path in tuning.CONFIGS.glob("*.json")}


@pytest.mark.gpu
def test_tuner_picks_a_candidate_for_each_bucket():
    space = tuning.spaces()["gate"]

    made = tuning.tune(space)

    assert [row["limits"] for row in made["buckets"]] == list(space.buckets)
    assert all(row["config"] in space.candidates({}) for row in made["buckets"])
    assert made["gpu"] == torch.cuda.get_device_name()
