"""What has to be done for one object: start reading here.

Pure: the object's spec and what was observed go in, a `Plan` comes out; time is an argument.
`controller.reconcile` observes, calls `plan`, has it carried out and writes the status. Children
are compared before they are written, so a cluster that is as it should be gets an empty plan.

Each tier of an object is a Deployment of its own (see `tiers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from deepseek_contract.deployment import DeepSeekDeploymentSpec, Degrade, Promote
from deepseek_contract.source import (
    NodePathSource,
    OciSource,
    PackageSource,
    PvcSource,
)
from deepseek_contract.status import ModelCachedReason
from deepseek_operator import autoscale, loader, recovery
from deepseek_operator.autoscale import ExternalMetrics, ScaledTier, ScalingState
from deepseek_operator.capacity import Room, View, see
from deepseek_operator.degrade import decide
from deepseek_operator.degrade_case import Case, Decision, Memory, Rules
from deepseek_operator.devices import Supply, requested, resource_of
from deepseek_operator.drift import deviations
from deepseek_operator.fleet import Fleet, Units, wish_of
from deepseek_operator.kinds import (
    AUTOSCALER,
    DEPLOYMENT,
    HTTP_ROUTE,
    SCALED_OBJECT,
    SECRET,
    SERVICE_ACCOUNT,
    VOLUME_CLAIM,
    Manifest,
    Reference,
    reference,
)
from deepseek_operator.pods import (
    image_trouble,
    is_ready,
    names_quota,
    placement_trouble,
    pod_trouble,
    refusal_of,
    with_refusal,
)
from deepseek_operator.quota import PodLimit
from deepseek_operator.render import (
    MODEL_ANNOTATION,
    PIN_ANNOTATION,
    TIER_LABEL,
    TOKEN_KEY,
    Owner,
    cache_name,
    claim_name,
    deployment,
    deployment_name,
    desired_state,
    grace_seconds,
    has_foreign_claim,
    pod_spec,
    with_hash,
)
from deepseek_operator.rollout import Rollout, Strategy, live_strategy, rollout_of
from deepseek_operator.routing import RouteState, http_route, route_state
from deepseek_operator.settings import Settings
from deepseek_operator.tiers import PRIMARY, Tier, tiers_of
from deepseek_operator.workers import Reading

REFUSAL_CHECK_SECONDS = 5.0
"""How often a loader's pod is looked for that was refused; nobody tells when it may come."""
REASON_CHECK_SECONDS = 15.0
"""How often it is asked why pods of a Deployment are refused while it is not for a quota: that may
become the reason, and only events tell."""
CLAIM_CHECK_SECONDS = 15.0
"""How often a volume or Secret of somebody else is looked for; it is not watched."""
SCALING_CHECK_SECONDS = 15.0
"""How often others' autoscalers and metrics servers are looked at while they are in the way."""


@dataclass(frozen=True)
class Observed:
    """One object and all that belongs to it, as views (see `views.view`)."""

    owner: Manifest
    children: Mapping[Reference, Manifest] = field(default_factory=dict)
    """Live children, without those of the model's cache."""
    pods: tuple[Manifest, ...] = ()
    """The workers."""
    cache: Mapping[Reference, Manifest] = field(default_factory=dict)
    """Claim, policy and jobs of the model's cache."""
    loader_pods: tuple[Manifest, ...] = ()
    foreign_claims: Mapping[str, Manifest] = field(default_factory=dict)
    """Of the claims that the spec names and somebody else made, those that are there, by name."""
    missing_secrets: tuple[str, ...] = ()
    """Secrets that the spec names and that are not there, or lack the key, in words."""
    missing_authorities: Mapping[str, str] = field(default_factory=dict)
    """By model's source: the same of the ConfigMap with the authority that its server needs."""
    loader_refusals: Mapping[str, str] = field(default_factory=dict)
    """By cache: why the API server refuses the loader's pod, in its words."""
    pod_refusals: Mapping[str, str] = field(default_factory=dict)
    """By Deployment whose pods the API server refuses, why it does now, where events tell."""
    quarantined: tuple[Manifest, ...] = ()
    """Workers that left their node's service and still hold its units."""
    readings: Mapping[str, Reading] = field(default_factory=dict)
    """What the workers say of themselves, by the uid of the pod."""
    is_deaf: bool = False
    """Whether most nodes are silent at once, so that it is rather us who hear nothing."""
    ready_nodes: Mapping[str, bool] | None = None
    """Whether each node is ready; None where the operator may not see them."""
    tolerated: Mapping[Reference, tuple[str, ...]] = field(default_factory=dict)
    """Deviations that came back with the answer to our own apply: an admission webhook of this
    cluster wants them so, and writing again would not change that."""

    supply: Supply | None = None
    """What the cluster's nodes offer; None where the operator sees none."""
    limits: Mapping[str, PodLimit] = field(default_factory=dict)
    """By tier, how many pods its tenant's share has room for."""
    fleet: Fleet | None = None
    """The nodes; None where the operator may not see them."""
    promised: Mapping[str, Units] = field(default_factory=dict)
    """By node, units that other objects' pods will take that are not bound yet."""
    foreign_autoscalers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """HorizontalPodAutoscalers of others, by the name of the Deployment that they scale."""
    external_metrics: ExternalMetrics = field(default_factory=ExternalMetrics)

    @property
    def identity(self) -> Owner:
        """The object, as children name it."""
        metadata = self.owner["metadata"]
        return Owner(metadata["namespace"], metadata["name"], metadata["uid"])

    def deployment(self, tier: str = PRIMARY) -> Manifest | None:
        """A tier's Deployment; if its pods are refused, in the newest words."""
        owner = self.identity
        name = deployment_name(owner, tier)
        live = self.children.get(Reference(DEPLOYMENT.kind, owner.namespace, name))
        words = self.pod_refusals.get(name)
        return live if live is None or words is None else with_refusal(live, words)

    @property
    def route(self) -> Manifest | None:
        """The HTTPRoute."""
        owner = self.identity
        return self.children.get(Reference(HTTP_ROUTE.kind, owner.namespace, owner.name))

    def scaled(self, tier: Tier) -> ScaledTier:
        """A tier with what has to do with its number of pods."""
        owner = self.identity
        name = deployment_name(owner, tier.name)
        return ScaledTier(
            owner=owner,
            tier=tier,
            deployment=self.deployment(tier.name),
            autoscaler=self.children.get(Reference(AUTOSCALER.kind, owner.namespace, name)),
            scaled_object=self.children.get(Reference(SCALED_OBJECT.kind, owner.namespace, name)),
            foreign=self.foreign_autoscalers.get(name, ()),
            pods=self.pods_of(tier.name),
            external_metrics=self.external_metrics,
        )

    @property
    def has_loader_without_pod(self) -> bool:
        """Whether a download waits for its pod to be created."""
        return any(loader.waits_for_pod(live) for live in self.cache.values())

    def pods_of(self, tier: str = PRIMARY) -> tuple[Manifest, ...]:
        """The workers of a tier."""
        return tuple(
            pod
            for pod in self.pods
            if (pod["metadata"].get("labels") or {}).get(TIER_LABEL) == tier
        )


@dataclass(frozen=True)
class ModelState:
    """Whether pods find the model, and what is being done about it: the condition ModelCached."""

    status: Literal["True", "False"]
    reason: ModelCachedReason
    message: str
    may_start: bool = True
    """Whether a pod started now could find the model."""


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
    draft = _Draft(observed)
    ladder = _climb(spec, observed, now, draft)
    all_tiers = tuple(_placed(tier, observed) for tier in tiers_of(spec))
    # A fallback's model is fetched before it is needed.
    models = {tier.name: _model(tier, observed, settings, now, draft) for tier in all_tiers}
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
    return draft.finish(
        tiers=tiers,
        models=models,
        scaling={tier.name: autoscale.scaling_state(tier, settings) for tier in scaled.values()},
        decision=decision,
        rollouts=choice.rollouts,
        ladder=ladder,
        route=route_state(spec, observed.route, settings),
        wishes=choice.wishes(decision),
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
    spec: DeepSeekDeploymentSpec, observed: Observed, now: datetime, draft: _Draft
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
    spec: DeepSeekDeploymentSpec, observed: Observed, settings: Settings, draft: _Draft
) -> None:
    wanted = http_route(observed.identity, spec) if settings.gateway_api else None
    if wanted is not None:
        draft.ensure(wanted, observed.children)
    elif observed.route is not None and "deletionTimestamp" not in observed.route["metadata"]:
        draft.delete(observed.route, "the HTTPRoute is not wanted any more")


def _scale(tier: ScaledTier, settings: Settings, observed: Observed, draft: _Draft) -> None:
    """One autoscaler at most, and the one that is wanted."""
    for live in tier.superfluous:
        draft.delete(live, f"{live['kind']} {tier.target} is not wanted any more")
    wanted = autoscale.autoscaler(tier, settings)
    if wanted is not None and tier.deployment is not None:
        draft.ensure(with_hash(wanted), observed.children)
    if tier.foreign or autoscale.is_obstructed(tier, settings):
        draft.look_again(SCALING_CHECK_SECONDS)


def is_owned_by(live: Manifest, uid: str) -> bool:
    """Whether an object says that it belongs to the object of this uid."""
    owners = live["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)


def _is_held_back(tier: Tier, observed: Observed, model: ModelState) -> bool:
    """Pods start once their model is there; until then those of the previous model go on."""
    if model.may_start:
        return False
    live = observed.deployment(tier.name)
    if live is None:
        return True
    annotations = live["spec"]["template"]["metadata"].get("annotations") or {}
    return bool(annotations.get(MODEL_ANNOTATION) != tier.model.source)


class _Draft:
    """A plan in the making."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._apply: list[Manifest] = []
        self._create: list[Manifest] = []
        self._delete: list[Manifest] = []
        self._again: float | None = None
        self.reasons: list[str] = []

    def ensure(self, manifest: Manifest, live_objects: Mapping[Reference, Manifest]) -> None:
        """Apply the manifest if the live object is missing or differs."""
        key = reference(manifest)
        live = live_objects.get(key)
        if live is None:
            # Somebody else's ServiceAccount would not conflict with ours, so it is not applied.
            is_created = key.kind == SERVICE_ACCOUNT.kind
            (self._create if is_created else self._apply).append(manifest)
            self.reasons.append(f"{key.kind} {key.name} is missing")
        elif "deletionTimestamp" not in live["metadata"]:
            found = deviations(manifest, live)
            if found and found != self._observed.tolerated.get(key):
                self._apply.append(manifest)
                self.reasons.append(f"{key.kind} {key.name} differs: {', '.join(found)[:500]}")

    def ensure_token(self, manifest: Manifest) -> None:
        """Create the Secret once; of a live one only labels and the like are kept up."""
        key = reference(manifest)
        live = self._observed.children.get(key)
        if live is not None and TOKEN_KEY in live["keys"]:
            self.ensure(manifest, self._observed.children)
        elif live is None or "deletionTimestamp" not in live["metadata"]:
            self.create(manifest, f"Secret {key.name} has no token")

    def create(self, manifest: Manifest, reason: str) -> None:
        self._create.append(manifest)
        self.reasons.append(reason)

    def delete(self, live: Manifest, reason: str) -> None:
        self._delete.append(live)
        self.reasons.append(reason)

    def look_again(self, seconds: float) -> None:
        """Plan anew after this time at the latest."""
        self._again = seconds if self._again is None else min(self._again, seconds)

    def finish(
        self,
        *,
        tiers: tuple[Tier, ...],
        wishes: Mapping[str, int],
        models: Mapping[str, ModelState],
        scaling: Mapping[str, ScalingState],
        ladder: recovery.Decision,
        route: RouteState | None,
        decision: Decision,
        rollouts: Mapping[str, Rollout],
    ) -> Plan:
        return Plan(
            apply=tuple(self._apply),
            create=tuple(self._create),
            delete=tuple(self._delete),
            models=models,
            tiers=tiers,
            wishes=wishes,
            scaling=scaling,
            ladder=ladder,
            route=route,
            decision=decision,
            rollouts=rollouts,
            requeue_after_seconds=self._again,
            reasons=tuple(self.reasons),
        )


def _model(
    tier: Tier,
    observed: Observed,
    settings: Settings,
    now: datetime,
    draft: _Draft,
) -> ModelState:
    """The state of a tier's sources; for a download also the next step of its cache."""
    state = _base_model(tier, observed, settings, now, draft)
    if state.status == "False":
        return state
    for adapter in tier.model.lora or []:
        source = adapter.parsed_source
        if isinstance(source, PvcSource):
            field = f"the source of '{adapter.name}' in spec.model.lora"
            volume = _claim(tier, source.claim, field, observed, draft)
            if volume.status == "False":
                return volume
    return state


def _base_model(
    tier: Tier,
    observed: Observed,
    settings: Settings,
    now: datetime,
    draft: _Draft,
) -> ModelState:
    match tier.model.parsed_source:
        case PackageSource(name=name):
            return ModelState("True", "InWorkerImage", f"{name} is in the worker's image.")
        case OciSource(image=image):
            return _image_volume(tier, image, observed)
        case PvcSource():
            return _volume(tier, observed, draft)
        case NodePathSource(path=path):
            return _node_path(tier, path, observed)
        case _:
            return _download(tier, observed, settings, now, draft)


def _image_volume(tier: Tier, image: str, observed: Observed) -> ModelState:
    for pod in observed.pods_of(tier.name):
        trouble = image_trouble(pod)
        if trouble is not None and image in trouble.message:
            return ModelState("False", "ImageUnavailable", trouble.message)
    return ModelState("True", "InImageVolume", f"The node mounts {image} into each pod.")


def _node_path(tier: Tier, path: str, observed: Observed) -> ModelState:
    refusal = creation_refusal(observed.deployment(tier.name))
    if refusal is not None and "hostPath" in refusal:
        return ModelState(
            "False",
            "CacheForbidden",
            f"The namespace's pod security forbids folders of the node: {refusal!r}. Use another"
            " form of spec.model.source, or serve from a namespace whose level is privileged.",
        )
    return ModelState("True", "OnNode", f"Each node has the model in {path}.")


def creation_refusal(deployment: Manifest | None) -> str | None:
    """Why the API server refuses to create the Deployment's pods, in its own words."""
    condition = refusal_of(deployment)
    return None if condition is None else str(condition.get("message", ""))


def _volume(tier: Tier, observed: Observed, draft: _Draft) -> ModelState:
    return _claim(tier, claim_name(tier.spec) or "", "spec.model.source", observed, draft)


def _claim(tier: Tier, name: str, field: str, observed: Observed, draft: _Draft) -> ModelState:
    """The state of a claim that somebody else made; `field` of the object names it."""
    claim = observed.foreign_claims.get(name)
    if claim is None:
        draft.look_again(CLAIM_CHECK_SECONDS)
        return ModelState(
            "False",
            "ClaimMissing",
            f"There is no PersistentVolumeClaim {name} in this namespace: create it, or change"
            f" {field}.",
        )
    if claim["status"].get("phase") != "Bound":
        draft.look_again(CLAIM_CHECK_SECONDS)
        return ModelState(
            "False",
            "ClaimPending",
            f"The claim {name} has no volume yet. Its storage class may wait for the first pod;"
            " if this lasts, `kubectl describe pvc` says why.",
        )
    trouble = _one_node_only(claim, observed.pods_of(tier.name))
    if trouble is not None:
        return ModelState("False", "SingleNodeVolume", trouble)
    return ModelState("True", "OnVolume", f"The claim {name} holds the model.")


def _one_node_only(claim: Manifest, pods: tuple[Manifest, ...]) -> str | None:
    """A message, when pods need a second node and the volume can only be on one."""
    modes = claim["spec"].get("accessModes") or []
    if any(mode in {"ReadWriteMany", "ReadOnlyMany"} for mode in modes):
        return None
    placed = {pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}
    waiting = [trouble for pod in pods if (trouble := placement_trouble(pod)) is not None]
    if not placed or not waiting:
        return None
    return (
        f"The volume of {claim['metadata']['name']} ({', '.join(modes)}) can be on one node only,"
        f" which is {sorted(placed)[0]}, and {len(waiting)} of the pods do not fit there. Use a"
        " ReadWriteMany claim, or fewer replicas."
    )


def _download(
    tier: Tier,
    observed: Observed,
    settings: Settings,
    now: datetime,
    draft: _Draft,
) -> ModelState:
    spec = tier.spec
    name = cache_name(spec.model.parsed_source) or ""
    owner = observed.identity
    claim = (
        observed.foreign_claims.get(claim_name(spec) or "")
        if has_foreign_claim(spec)
        else _own_claim(owner, name, observed)
    )
    if not has_foreign_claim(spec):
        draft.ensure(loader.volume_claim(owner.namespace, name, spec, claim), observed.cache)
    elif claim is None:
        return replace(_volume(tier, observed, draft), may_start=False)
    if claim is None or "deletionTimestamp" in claim["metadata"]:
        return ModelState("False", "Waiting", f"The volume {name} is being made.", may_start=False)
    draft.ensure(
        loader.network_policy(owner.namespace, name, spec, settings, claim), observed.cache
    )

    tries = loader.attempts(
        live
        for live in observed.cache.values()
        if live["kind"] == "Job" and is_owned_by(live, claim["metadata"]["uid"])
    )
    done = next((attempt for attempt in tries if attempt.phase == "done"), None)
    for old in tries:
        if old is not (done or tries[0]):
            draft.delete(old.job, f"Job {old.job['metadata']['name']} is superseded")
    if done is not None:
        trouble = _one_node_only(claim, observed.pods_of(tier.name))
        if trouble is not None:
            return ModelState("False", "SingleNodeVolume", trouble)
        return ModelState("True", "Downloaded", f"{spec.model.source} is on the volume {name}.")
    if not tries:
        first = loader.job(owner, name, spec, settings, claim)
        draft.create(first, f"{spec.model.source} has to be downloaded")
        return _downloading(spec, observed, None)
    return _next_attempt(_Download(spec, observed, settings, claim, tries[0]), now, draft)


def _own_claim(owner: Owner, name: str, observed: Observed) -> Manifest | None:
    return observed.cache.get(Reference(VOLUME_CLAIM.kind, owner.namespace, name))


@dataclass(frozen=True)
class _Download:
    """A download that has been tried at least once."""

    spec: DeepSeekDeploymentSpec
    observed: Observed
    settings: Settings
    claim: Manifest
    latest: loader.Attempt

    @property
    def is_my_old_wish(self) -> bool:
        """Whether this very object asked for the attempt and would ask for another one now."""
        annotations = self.latest.job["metadata"].get("annotations") or {}
        return annotations.get(
            loader.REQUESTER_ANNOTATION
        ) == self.observed.identity.name and annotations.get(loader.WISH_ANNOTATION) != loader.wish(
            self.spec, self.settings
        )

    @property
    def has_started(self) -> bool:
        """Whether the attempt got as far as running."""
        return any(loader.has_started(pod, self.latest) for pod in self.observed.loader_pods)


def _next_attempt(download: _Download, now: datetime, draft: _Draft) -> ModelState:
    """Wait for an attempt that runs, or make another one when it is due."""
    spec, observed, latest = download.spec, download.observed, download.latest
    failure = latest.previous_failure
    if latest.phase == "running":
        if not download.is_my_old_wish or download.has_started:
            return _downloading(spec, observed, failure)
    else:
        failure = loader.failure_of(latest, observed.loader_pods)
        due = loader.retry_seconds(latest.number)
        waited = (now - latest.failed_at).total_seconds() if latest.failed_at else due
        if waited < due and not download.is_my_old_wish:
            draft.look_again(due - waited)
            return _failed(failure, f"Attempt {latest.number} failed; the next one follows.")
    number = latest.number + 1
    following = loader.job(
        observed.identity,
        cache_name(spec.model.parsed_source) or "",
        spec,
        download.settings,
        download.claim,
        number=number,
        last_failure=failure,
    )
    draft.create(following, f"Attempt {number} to download {spec.model.source}")
    draft.delete(latest.job, f"Job {latest.job['metadata']['name']} is superseded")
    return _downloading(spec, observed, failure)


def _failed(failure: loader.Failure, what_now: str) -> ModelState:
    return ModelState("False", failure.reason, f"{failure.message} {what_now}", may_start=False)


def _downloading(
    spec: DeepSeekDeploymentSpec, observed: Observed, previous: loader.Failure | None
) -> ModelState:
    """A download that goes on; after a failure it is told as that failure until it succeeds."""
    told = _before_the_pod(spec, observed)
    if told is None and previous is not None:
        return _failed(previous, "It is being tried again.")
    told = told or _of_the_pod(spec, observed)
    if told is not None:
        return told
    return ModelState(
        "False",
        "Downloading",
        f"{spec.model.source} is being downloaded; `kubectl logs` of the loader's pod shows how"
        " far it is.",
        may_start=False,
    )


def _before_the_pod(spec: DeepSeekDeploymentSpec, observed: Observed) -> ModelState | None:
    """What keeps the loader's pod from existing or from starting, without a word of its own."""
    refusal = observed.loader_refusals.get(cache_name(spec.model.parsed_source) or "")
    if refusal is not None:
        message = (
            f"The API server refuses the loader's pod: {refusal!r}. Ask for more quota, or change"
            " what the message names; the download then goes on by itself."
        )
        return ModelState("False", "CreationRefused", message, may_start=False)
    missing = observed.missing_authorities.get(spec.model.source)
    if missing is not None:
        return ModelState("False", "ConfigMapMissing", missing, may_start=False)
    return None


def _of_the_pod(spec: DeepSeekDeploymentSpec, observed: Observed) -> ModelState | None:
    """What keeps the loader's pod from running."""
    name = cache_name(spec.model.parsed_source)
    troubles = [
        trouble
        for pod in observed.loader_pods
        if (pod["metadata"].get("labels") or {}).get(loader.MODEL_LABEL) == name
        and (trouble := pod_trouble(pod)) is not None
    ]
    reason, words = (troubles[0].reason, troubles[0].message) if troubles else ("", "")
    if reason == "ImageUnavailable":
        return ModelState("False", "ImageUnavailable", words, may_start=False)
    if reason == "VolumeUnavailable":
        return ModelState("False", "ClaimPending", words, may_start=False)
    if observed.missing_secrets:
        missing = " ".join(observed.missing_secrets)
        return ModelState("False", "SecretMissing", missing, may_start=False)
    if reason == "Unschedulable":
        return ModelState("False", "Waiting", words, may_start=False)
    return None
