"""What has to be done for one object: start reading here.

Pure: the object's spec and what was observed go in, a `Plan` comes out; time is an argument.
`controller.reconcile` observes, calls `plan`, has it carried out and writes the status. Children
are compared before they are written, so a cluster that is as it should be gets an empty plan.

Each tier of an object is a Deployment of its own (see `tiers`). `observed` is what was seen;
`models` takes the next step towards each tier's model, `degrade` chooses the tiers that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from deepseek_contract.deployment import DeepSeekDeploymentSpec, Degrade, Promote
from deepseek_operator import autoscale, recovery
from deepseek_operator.autoscale import ScaledTier, ScalingState
from deepseek_operator.capacity import Room, View, see
from deepseek_operator.degrade import decide
from deepseek_operator.degrade_case import Case, Decision, Memory, Rules
from deepseek_operator.devices import requested, resource_of
from deepseek_operator.draft import Draft
from deepseek_operator.fleet import wish_of
from deepseek_operator.kinds import DEPLOYMENT, SECRET, Manifest, is_owned_by, reference
from deepseek_operator.models import model_state
from deepseek_operator.observed import Observed
from deepseek_operator.pods import creation_refusal, first_look_seconds, is_ready, names_quota
from deepseek_operator.render import (
    MODEL_ANNOTATION,
    PIN_ANNOTATION,
    TIER_LABEL,
    deployment,
    deployment_name,
    desired_state,
    grace_seconds,
    pod_spec,
    with_hash,
)
from deepseek_operator.rollout import Rollout, Strategy, live_strategy, rollout_of
from deepseek_operator.routing import RouteState, http_route, route_state
from deepseek_operator.settings import Settings
from deepseek_operator.tiers import PRIMARY, Tier, tiers_of
from deepseek_operator.volumes import CLAIM_CHECK_SECONDS, ModelState

REFUSAL_CHECK_SECONDS = 5.0
"""How often a loader's pod is looked for that was refused; nobody tells when it may come."""
REASON_CHECK_SECONDS = 15.0
"""How often it is asked why pods of a Deployment are refused while it is not for a quota: that may
become the reason, and only events tell."""
SCALING_CHECK_SECONDS = 15.0
"""How often others' autoscalers and metrics servers are looked at while they are in the way."""


@dataclass(frozen=True)
class Plan:
    """What to write, and when to look again."""

    apply: tuple[Manifest, ...]
    """Manifests for server-side apply."""
    create: tuple[Manifest, ...]
    """Manifests of objects that must not exist yet: the token's Secret, ServiceAccounts, jobs."""
    delete: tuple[Manifest, ...]
    """Live objects."""
    models: Mapping[str, ModelState]
    """By tier."""
    tiers: tuple[Tier, ...]
    """With the pods that they are to have now."""
    scaling: Mapping[str, ScalingState]
    """By tier."""
    decision: Decision
    """Which tiers run, and why."""
    rollouts: Mapping[str, Rollout]
    """By tier."""
    wishes: Mapping[str, int] = field(default_factory=dict)
    """By tier, the pods that it would have if its tenant's share were no limit."""
    ladder: recovery.Decision = field(default_factory=recovery.Decision)
    """Which pods leave their node."""
    route: RouteState | None = None
    """Whether Gateways take the object's HTTPRoute; None where it wants none."""
    requeue_after_seconds: float | None = None
    reasons: tuple[str, ...] = ()
    """Why each write is needed, for the log."""

    @property
    def model(self) -> ModelState:
        """The primary's."""
        return self.models[PRIMARY]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (
            self.apply or self.create or self.delete or self.ladder.quarantine or self.ladder.end
        )


def plan(
    spec: DeepSeekDeploymentSpec,
    observed: Observed,
    settings: Settings,
    now: datetime,
    memory: Memory | None = None,
) -> Plan:
    """Everything that brings the cluster from `observed` to what `spec` wants.

    Args:
        spec: The object's.
        observed: What there is.
        settings: The installation's.
        now: The time.
        memory: What the last decision about tiers left; absent, what the status has of it.
    """
    draft = Draft(observed)
    ladder = _climb(spec, observed, now, draft)
    all_tiers = tuple(_placed(tier, observed) for tier in tiers_of(spec))
    # A fallback's model is fetched before it is needed.
    models = {tier.name: model_state(tier, observed, settings, now, draft) for tier in all_tiers}
    memory = memory or Memory.of((observed.owner.get("status") or {}).get("degrade"))
    choice = _Choice(observed, settings, models, now, tiers=all_tiers)
    decision = choice.decide(memory, ladder.demand)
    tiers = choice.tiers(decision)
    held_back = {
        deployment_name(observed.identity, tier.name): words
        for tier in tiers
        if (words := choice.waits_for(tier, models[tier.name])) is not None
    }
    scaled = {tier.target: tier for tier in map(observed.scaled, tiers)}
    for manifest in desired_state(observed.identity, spec, settings, tiers):
        name = manifest["metadata"]["name"]
        if manifest["kind"] == SECRET.kind:
            draft.ensure_token(manifest)
        elif manifest["kind"] == DEPLOYMENT.kind and name in held_back:
            draft.reasons.append(f"{name} waits for {held_back[name]}")
        elif manifest["kind"] == DEPLOYMENT.kind:
            manifest = autoscale.with_replicas(manifest, scaled[name])  # noqa: PLW2901
            draft.ensure(manifest, observed.children)
        else:
            draft.ensure(manifest, observed.children)
    _route(spec, observed, settings, draft)
    for live in _superfluous_tiers(observed, tiers):
        draft.delete(live, f"Deployment {live['metadata']['name']} is not wanted any more")
    for tier in scaled.values():
        _scale(tier, settings, observed, draft)
    if observed.missing_secrets or observed.missing_authorities:
        draft.look_again(CLAIM_CHECK_SECONDS)
    if observed.loader_refusals or observed.has_loader_without_pod:
        draft.look_again(REFUSAL_CHECK_SECONDS)
    refusals = [creation_refusal(observed.deployment(tier.name)) for tier in tiers]
    if any(words is not None and not names_quota(words) for words in refusals):
        draft.look_again(REASON_CHECK_SECONDS)
    if decision.again_seconds is not None:
        draft.look_again(decision.again_seconds)
    _await_first_looks(observed.pods, now, draft)
    return Plan(
        apply=tuple(draft.to_apply),
        create=tuple(draft.to_create),
        delete=tuple(draft.to_delete),
        models=models,
        tiers=tiers,
        scaling={tier.name: autoscale.scaling_state(tier, settings) for tier in scaled.values()},
        decision=decision,
        rollouts=choice.rollouts,
        wishes=choice.wishes(decision),
        ladder=ladder,
        route=route_state(spec, observed.route, settings),
        requeue_after_seconds=draft.again_seconds,
        reasons=tuple(draft.reasons),
    )


def _placed(tier: Tier, observed: Observed) -> Tier:
    """The tier as its nodes call its device."""
    resource = resource_of(tier.gpu, observed.supply, requested(observed.deployment(tier.name)))
    return replace(tier, resource=resource)


class _Choice:
    """Which tiers run, and how changes reach their pods."""

    def __init__(
        self,
        observed: Observed,
        settings: Settings,
        models: Mapping[str, ModelState],
        now: datetime,
        *,
        tiers: tuple[Tier, ...],
    ) -> None:
        self._observed, self._now, self._tiers = observed, now, tiers
        owner, fleet = observed.identity, observed.fleet
        wishes = {tier.name: wish_of(pod_spec(owner, tier, settings)) for tier in tiers}
        self._room = Room(wishes, fleet, observed.promised)
        is_counted = fleet.is_bound if fleet is not None and fleet.is_known else None
        self._views = tuple(
            View(
                tier=tier,
                wanted=observed.scaled(tier).wanted_replicas
                if tier.is_primary
                else tiers[0].replicas,
                seen=see(
                    observed.deployment(tier.name), observed.pods_of(tier.name), now, is_counted
                ),
                may_start=models[tier.name].may_start,
                most=limit.now if (limit := observed.limits.get(tier.name)) is not None else None,
            )
            for tier in tiers
        )
        self.rollouts = {view.name: self._rollout(view, settings) for view in self._views}

    def _rollout(self, view: View, settings: Settings) -> Rollout:
        live = self._observed.deployment(view.name)
        tier = view.tier.with_replicas(1)
        if live is not None:
            tier = tier.with_rollout(live_strategy(live))
        owner = self._observed.identity
        wanted = with_hash(deployment(owner, tier, settings))
        has_fallbacks = view.tier.is_primary and len(self._views) > 1
        return rollout_of(
            view,
            live,
            wanted,
            self._room,
            has_fallbacks=has_fallbacks,
            tolerated=self._observed.tolerated.get(reference(wanted), ()),
        )

    def decide(self, memory: Memory, demand: str | None) -> Decision:
        """The tiers that run now; the recovery ladder may want a fallback at once."""
        spec, metadata = self._tiers[0].spec, self._observed.owner["metadata"]
        degrading, promoting = spec.degrade or Degrade(), spec.promote or Promote()
        rules = Rules(
            degrade_after_seconds=degrading.after_seconds,
            promote_after_seconds=promoting.after_seconds,
            strategy=promoting.strategy,
            pin=(metadata.get("annotations") or {}).get(PIN_ANNOTATION),
            drain_seconds=grace_seconds(spec),
        )
        return decide(
            Case(
                views=self._views,
                rules=rules,
                room=self._room,
                memory=memory,
                now=self._now,
                generation=metadata.get("generation", 0),
                demand=self._beyond_share(self._views[0]) or demand,
                rolls_via_fallback=self.rollouts[PRIMARY].goes_via_fallback,
            )
        )

    def tiers(self, decision: Decision) -> tuple[Tier, ...]:
        """All tiers, with the pods that they get and the way in which these change."""
        return tuple(
            tier.with_replicas(decision.replicas.get(tier.name, 0))
            .within(self._observed.limits.get(tier.name))
            .with_rollout(self._strategy(tier.name))
            for tier in self._tiers
        )

    def wishes(self, decision: Decision) -> dict[str, int]:
        """Pods that each tier would have if its tenant's share were no limit."""
        wishes = {tier.name: decision.replicas.get(tier.name, 0) for tier in self._tiers}
        # Pods that are held back for a quota are wished for all the same.
        return wishes | {PRIMARY: self._tiers[0].replicas}

    def _beyond_share(self, primary: View) -> str | None:
        limit = self._observed.limits.get(PRIMARY)
        return limit.message if limit is not None and limit.now < primary.needed else None

    def _strategy(self, tier: str) -> Strategy:
        rollout = self.rollouts[tier]
        if rollout.goes_via_fallback and self._fallback_answers:
            return "replace"
        return rollout.strategy

    @property
    def _fallback_answers(self) -> bool:
        return any(view.seen.num_ready for view in self._views[1:])

    def waits_for(self, tier: Tier, model: ModelState) -> str | None:
        """What a tier's Deployment is held back for, if it is."""
        if _is_held_back(tier, self._observed, model):
            return "its model"
        rollout = self.rollouts[tier.name]
        if rollout.goes_via_fallback and rollout.is_new and not self._fallback_answers:
            return "a fallback that serves meanwhile"
        return None


def _superfluous_tiers(observed: Observed, tiers: tuple[Tier, ...]) -> list[Manifest]:
    """Deployments of fallbacks that are to have no pods.

    One that the spec names no longer goes once another tier answers: it may be all there is.
    """
    wanted = {tier.name: tier.is_primary or tier.replicas > 0 for tier in tiers}
    answering = {
        (pod["metadata"].get("labels") or {}).get(TIER_LABEL)
        for pod in observed.pods
        if is_ready(pod)
    }
    found = []
    for key, live in observed.children.items():
        tier = (live["metadata"].get("labels") or {}).get(TIER_LABEL)
        if (
            key.kind != DEPLOYMENT.kind
            or tier is None
            or wanted.get(tier)
            or "deletionTimestamp" in live["metadata"]
            or not is_owned_by(live, observed.identity.uid)
        ):
            continue
        if tier in wanted or tier not in answering or answering - {tier}:
            found.append(live)
    return found


def _climb(
    spec: DeepSeekDeploymentSpec, observed: Observed, now: datetime, draft: Draft
) -> recovery.Decision:
    """The recovery ladder's second level."""
    status = observed.owner.get("status") or {}
    labels = {pod["metadata"]["uid"]: pod["metadata"].get("labels") or {} for pod in observed.pods}
    ladder = recovery.decide(
        recovery.Case(
            pods=observed.pods,
            quarantined=observed.quarantined,
            wanted={
                live["metadata"]["labels"][TIER_LABEL]: live["spec"].get("replicas", 1)
                for key, live in observed.children.items()
                if key.kind == DEPLOYMENT.kind and TIER_LABEL in live["metadata"]["labels"]
            },
            readings=observed.readings,
            now=now,
            tier_of={uid: found.get(TIER_LABEL, "") for uid, found in labels.items()},
            ready_nodes=observed.ready_nodes,
            is_deaf=observed.is_deaf,
            switches_per_hour=spec.recovery.node_switches_per_hour,
            status=status.get("recovery") or {},
            is_degraded=any(
                condition.get("type") == "Degraded" and condition.get("status") == "True"
                for condition in status.get("conditions") or []
            ),
            degradations=(status.get("degrade") or {}).get("degradations", 0),
        )
    )
    draft.reasons += [f"quarantine: {sick.reason}" for sick in ladder.quarantine]
    draft.reasons += [ending.reason for ending in ladder.end]
    if ladder.look_again_seconds is not None:
        draft.look_again(ladder.look_again_seconds)
    return ladder


def _route(
    spec: DeepSeekDeploymentSpec, observed: Observed, settings: Settings, draft: Draft
) -> None:
    wanted = http_route(observed.identity, spec) if settings.gateway_api else None
    if wanted is not None:
        draft.ensure(wanted, observed.children)
    elif observed.route is not None and "deletionTimestamp" not in observed.route["metadata"]:
        draft.delete(observed.route, "the HTTPRoute is not wanted any more")


def _scale(tier: ScaledTier, settings: Settings, observed: Observed, draft: Draft) -> None:
    """One autoscaler at most, and the one that is wanted."""
    for live in tier.superfluous:
        draft.delete(live, f"{live['kind']} {tier.target} is not wanted any more")
    wanted = autoscale.autoscaler(tier, settings)
    if wanted is not None and tier.deployment is not None:
        draft.ensure(with_hash(wanted), observed.children)
    if tier.foreign or autoscale.is_obstructed(tier, settings):
        draft.look_again(SCALING_CHECK_SECONDS)


def _await_first_looks(pods: tuple[Manifest, ...], now: datetime, draft: Draft) -> None:
    """Nobody tells that a worker had the time to be seen ready, and was not."""
    for pod in pods:
        seconds = first_look_seconds(pod, now)
        if seconds is not None:
            draft.look_again(seconds)


def _is_held_back(tier: Tier, observed: Observed, model: ModelState) -> bool:
    """Pods start once their model is there; until then those of the previous model go on."""
    if model.may_start:
        return False
    live = observed.deployment(tier.name)
    if live is None:
        return True
    annotations = live["spec"]["template"]["metadata"].get("annotations") or {}
    return bool(annotations.get(MODEL_ANNOTATION) != tier.model.source)
