"""One cluster for all end-to-end tests, the chart installed in it, a namespace for each test."""

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/e2e")]

from cluster import Cluster, images, leftovers  # noqa: E402
from demo import Target, install  # noqa: E402
from site_under_test import Namespace, Site  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at all that the others did comes late; last, what takes the role away."""
    last = ("test_permissions.py", "test_lifecycle.py")
    items.sort(key=lambda item: last.index(item.path.name) if item.path.name in last else -1)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """The cluster with Prometheus and the chart; it is taken down at the end."""
    leftovers.remove_orphans()
    cluster = Cluster(leftovers.owned("e2e"))
    try:
        built = images.ensure()
        cluster.up(metrics=True)
        cluster.load(built.values())
        target = Target(str(cluster.kubeconfig), built["operator"], built["worker"], cluster)
        install(target)
        yield Site(cluster, target)
    finally:
        assert cluster.down() == []


@pytest.fixture
def namespace(site: Site, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """A namespace of the test's own under restricted pod security."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:6]
    with site.place(f"{words[:50].strip('-')}-{digest}") as found:
        yield found
