"""The add-ons' manifests are whole once their names are filled in."""

import re
import string

import pytest
import yaml

from cluster import places

VALUES = {"dns": "10.0.0.10", "image": "i:1", "prometheus": "p:1", "adapter": "a:1"}


@pytest.mark.parametrize("name", ["dns.yaml", "metrics.yaml"])
def test_a_manifest_holds_objects_with_names(name):
    text = (places.MANIFESTS / name).read_text()

    documents = list(yaml.safe_load_all(string.Template(text).substitute(VALUES)))

    assert all(document["kind"] and document["metadata"]["name"] for document in documents)


def test_every_metric_of_the_adapter_is_one_that_workers_export():
    text = (places.MANIFESTS / "metrics.yaml").read_text()
    exported = (places.REPOSITORY / "contract/deepseek_contract/metrics.py").read_text()

    for metric in re.findall(r"matches: (\w+)", text):
        assert f'"{metric}"' in exported, metric
