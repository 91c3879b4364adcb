"""The add-ons' manifests are whole once their names are filled in."""

import string

import pytest
import yaml

from cluster import addons, places

VALUES = {"dns": "10.0.0.10", "image": "i:1"}


@pytest.mark.parametrize("name", ["dns.yaml", "metrics.yaml"])
def test_a_manifest_holds_objects_with_names(name):
    text = (places.MANIFESTS / name).read_text()

    values = VALUES | addons.metrics_values()
    documents = list(yaml.safe_load_all(string.Template(text).substitute(values)))

    assert all(document["kind"] and document["metadata"]["name"] for document in documents)


def test_prometheus_and_the_adapter_get_what_the_chart_ships():
    text = (places.MANIFESTS / "metrics.yaml").read_text()
    maps = {
        document["metadata"]["name"]: document["data"]
        for document in yaml.safe_load_all(
            string.Template(text).substitute(addons.metrics_values())
        )
        if document["kind"] == "ConfigMap"
    }
    files = addons.CHART_FILES

    prometheus = yaml.safe_load(maps["prometheus"]["prometheus.yml"])
    adapter = yaml.safe_load(maps["prometheus-adapter"]["config.yaml"])

    shipped = yaml.safe_load((files / "scrape-config.yaml").read_text())
    assert prometheus["scrape_configs"] == shipped
    assert adapter == yaml.safe_load((files / "adapter-config.yaml").read_text())
