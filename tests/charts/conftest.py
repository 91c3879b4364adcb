"""The chart, rendered by the real helm."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import rendering  # noqa: E402

Manifest = dict[str, Any]


@cache
def rendered(release: str, namespace: str, flags: tuple[str, ...]) -> str:
    return rendering.template(release, *flags, namespace=namespace)


class Chart:
    """Renders the chart with some values."""

    def render(
        self, *flags: str, release: str = "deepseek", namespace: str = "deepseek-system"
    ) -> list[Manifest]:
        text = rendered(release, namespace, flags)
        return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]

    def refusal(self, *flags: str) -> str:
        """What helm says to values that it does not take."""
        with pytest.raises(rendering.RenderingError) as refused:
            self.render(*flags)
        return str(refused.value)


@pytest.fixture
def chart() -> Chart:
    return Chart()
