"""The model's own part of the object; what it may say is in the table of test_deployment."""

from deepseek_contract.model import ModelCache, ModelSpec
from deepseek_contract.source import HubSource, PackageSource


def test_the_default_is_the_model_in_the_workers_image() -> None:
    assert ModelSpec().parsed_source == PackageSource("smollm2")


def test_the_source_is_taken_apart() -> None:
    model = ModelSpec.parse({"source": "hf://org/name@main"})

    assert model.parsed_source == HubSource("org/name", "main")


def test_a_claim_that_is_made_has_100_gib_for_one_node_unless_told() -> None:
    assert (ModelCache().claim_size_gib, ModelCache().claim_access_mode) == (100, "ReadWriteOnce")
    chosen = ModelCache(size_gib=5, access_mode="ReadWriteMany")
    assert (chosen.claim_size_gib, chosen.claim_access_mode) == (5, "ReadWriteMany")
