"""Whether a tier's pods find their model and its adapters, and what is done about it.

Pure. Called by `plan` for each tier. What the worker's image holds is there; what a volume holds is
judged in `volumes`, and what has to be downloaded is fetched step by step in `download`.
"""

from __future__ import annotations

from datetime import datetime

from deepseek_contract.source import NodePathSource, OciSource, PackageSource, PvcSource
from deepseek_operator.download import download
from deepseek_operator.draft import Draft
from deepseek_operator.observed import Observed
from deepseek_operator.settings import Settings
from deepseek_operator.tiers import Tier
from deepseek_operator.volumes import ModelState, image_volume, named_claim, node_path


def model_state(
    tier: Tier,
    observed: Observed,
    settings: Settings,
    now: datetime,
    draft: Draft,
) -> ModelState:
    """The state of a tier's sources; for a download also the next step of its cache."""
    state = _own_state(tier, observed, settings, now, draft)
    if state.status == "False":
        return state
    for adapter in tier.model.lora or []:
        source = adapter.parsed_source
        if isinstance(source, PvcSource):
            field = f"the source of '{adapter.name}' in spec.model.lora"
            volume = named_claim(tier, source.claim, field, observed, draft)
            if volume.status == "False":
                return volume
    return state


def _own_state(
    tier: Tier,
    observed: Observed,
    settings: Settings,
    now: datetime,
    draft: Draft,
) -> ModelState:
    match tier.model.parsed_source:
        case PackageSource(name=name):
            return ModelState("True", "InWorkerImage", f"{name} is in the worker's image.")
        case OciSource(image=image):
            return image_volume(tier, image, observed)
        case PvcSource(claim=claim):
            return named_claim(tier, claim, "spec.model.source", observed, draft)
        case NodePathSource(path=path):
            return node_path(tier, path, observed)
        case _:
            return download(tier, observed, settings, now, draft)
