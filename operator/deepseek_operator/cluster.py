"""What the cluster looks like, and making it look otherwise.

`Cluster` keeps the objects that matter in memory: filled by lists, kept fresh by watch events
and by the answers to its own writes, so that a reconcile reads almost nothing and never acts on a
state older than its own last write. Only this module writes children, status and events.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.source import is_source, parse_source
from deepseek_operator.api import Api
from deepseek_operator.autoscale import (
    EXTERNAL_METRICS,
    ExternalMetrics,
    external_metrics,
    is_owned_by_another,
)
from deepseek_operator.drift import deviations
from deepseek_operator.errors import (
    ApiError,
    ClusterBusyError,
    ConflictError,
    NotFoundError,
    RefusedError,
)
from deepseek_operator.kinds import (
    API_SERVICE,
    AUTOSCALER,
    CONFIG_MAP,
    DEEPSEEK_DEPLOYMENT,
    DEPLOYMENT,
    EVENT,
    HTTP_ROUTE,
    JOB,
    KIND_OF,
    OPTIONAL_KINDS,
    POD,
    SCALED_OBJECT,
    SECRET,
    SERVICE_ACCOUNT,
    VOLUME_CLAIM,
    Kind,
    Manifest,
    Reference,
    is_owned_by,
    optional_kinds,
    reference,
    watched_kinds,
)
from deepseek_operator.loader import MODEL_LABEL, waits_for_pod
from deepseek_operator.observed import Observed
from deepseek_operator.plan import Plan
from deepseek_operator.pods import is_running, names_quota, refusal_of
from deepseek_operator.probe import Target
from deepseek_operator.recovery import (
    QUARANTINE_LABEL,
    Decision,
    Ending,
    Sick,
    quarantine_patch,
)
from deepseek_operator.render import (
    DEPLOYMENT_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    MANAGED_BY_SELECTOR,
    PORT,
    TIER_LABEL,
    TOKEN_KEY,
    Owner,
    cache_name,
    foreign_claims,
    owner_reference,
    token_secret_name,
)
from deepseek_operator.routing import without_retries
from deepseek_operator.settings import Settings
from deepseek_operator.status import Note, Refusal
from deepseek_operator.tiers import tiers_of
from deepseek_operator.versions import Departed, is_newer
from deepseek_operator.views import matters, view
from deepseek_operator.workers import Reading, Readings, is_deaf

logger = logging.getLogger(__name__)

FAILED_CREATE = "FailedCreate"
"""Reason of the event that a controller posts about a pod that it may not create."""
OPENAPI = "/openapi/v3"
EXTERNAL_METRICS_SECONDS = 5.0
"""How long an answer about the API of the metrics is good for."""


class Name(NamedTuple):
    """A DeepSeekDeployment."""

    namespace: str
    name: str


class Cluster:
    """The operator's picture of the cluster, and its hands in it. Used from one event loop.

    Args:
        wake: Called with each object that the answer to a write brings news for. The watch will
            tell nothing new then, since it comes later.
    """

    def __init__(self, api: Api, settings: Settings, wake: Callable[[Name], None]) -> None:
        self._api = api
        self._settings = settings
        self._wake = wake
        self._objects: dict[Reference, Manifest] = {}
        self._by_owner: defaultdict[Name, set[Reference]] = defaultdict(set)
        self._by_model: defaultdict[Name, set[Reference]] = defaultdict(set)
        self._users_of_model: defaultdict[Name, set[Name]] = defaultdict(set)
        self._tolerated: dict[Reference, tuple[str, ...]] = {}
        self._known_external_metrics = ExternalMetrics()
        self._external_metrics_until = 0.0
        self._tokens: dict[Reference, str] = {}
        """By Secret: what its workers ask for at `GET /state`."""
        self.readings = Readings()
        self._schemas: dict[Kind, str | None] = {}
        """Of the kinds of others that are used, where their schema is, with its hash."""
        self._departed = Departed()

    @property
    def names(self) -> list[Name]:
        """All DeepSeekDeployments."""
        kind = DEEPSEEK_DEPLOYMENT.kind
        return [Name(key.namespace, key.name) for key in self._objects if key.kind == kind]

    def names_on(self, nodes: Set[str]) -> set[Name]:
        """The DeepSeekDeployments that have a pod on one of some nodes, in quarantine or not."""
        return {
            name
            for name, keys in self._by_owner.items()
            if nodes
            and any(
                key.kind == POD.kind and self._objects[key]["spec"].get("nodeName") in nodes
                for key in keys
            )
        }

    # Filling the picture.

    async def resync(self, paths: Set[str] | None = None) -> set[Name]:
        """List everything, and return the objects for which something had been missed.

        Args:
            paths: Of the lists to look at; None for all.

        Raises:
            ApiError: A kind could not be listed.
        """
        touched: set[Name] = set()
        for kind in watched_kinds(keda=self._settings.keda, gateway_api=self._settings.gateway_api):
            for namespace in self._settings.watch_namespaces or (None,):
                if paths is None or kind.path(namespace) in paths:
                    touched |= await self._resync_kind(kind, namespace)
        return touched

    async def rediscover(self) -> bool:
        """Look whether the CRDs of others that are used came or changed.

        What the API server did not take of such a child is tried again then. The schemas' hashes
        are in the index of the OpenAPI documents, which every account may read.

        Returns:
            Whether a kind is there that was not, so that it has to be watched.

        Raises:
            ApiError: The index could not be read.
        """
        used = optional_kinds(keda=self._settings.keda, gateway_api=self._settings.gateway_api)
        if not used:
            return False
        paths = (await self._api.request("GET", OPENAPI)).get("paths") or {}
        before, self._schemas = (
            self._schemas,
            {
                kind: (paths.get(f"apis/{kind.api_version}") or {}).get("serverRelativeURL")
                for kind in used
            },
        )
        changed = [kind for kind in used if self._schemas[kind] != before.get(kind)]
        for key in [key for key in self._tolerated if KIND_OF[key.kind] in changed]:
            del self._tolerated[key]
        if before and changed:
            logger.info("Changed: the API of %s", ", ".join(kind.kind for kind in changed))
            for name in self.names:
                self._wake(name)
        return bool(before) and any(before[k] is None and self._schemas[k] for k in changed)

    def notice(self, event_type: str | None, manifest: Manifest) -> set[Name]:
        """Take in a watch event, or what was read or answered, and return what to look at.

        Args:
            event_type: Of the watch event; None for what was listed or came as an answer. That
                counts also where it is of the version that is known: a watch that was opened
                before a CRD changed leaves out the new fields.
            manifest: The object.
        """
        key = reference(manifest)
        uid = manifest["metadata"]["uid"]
        old = self._objects.get(key)
        if event_type == "DELETED":
            # Also said of an object that lost the label it is watched by, and lives on.
            self._departed.add(manifest)
            if old is None or old["metadata"]["uid"] != uid:
                return set()
            return self._remove(key)
        is_back = self._departed.is_back(manifest)
        if uid in self._departed and not is_back:
            return set()
        is_known = old is not None and _version(old) == _version(manifest)
        if is_known and event_type is not None:
            return set()
        if not is_back and old is not None and not is_known and not is_newer(manifest, old):
            return set()
        self._departed.discard(uid)
        if key.kind == SECRET.kind:
            self._keep_token(key, manifest)
        new = view(manifest)
        concerned = self._concerned(key) | self._store(key, new)
        return concerned if matters(old, new) else set()

    async def _resync_kind(self, kind: Kind, namespace: str | None) -> set[Name]:
        selector = "" if kind == DEEPSEEK_DEPLOYMENT else MANAGED_BY_SELECTOR
        before = {
            key: live["metadata"]["uid"]
            for key, live in self._objects.items()
            if key.kind == kind.kind and namespace in {None, key.namespace}
        }
        seen: set[Reference] = set()
        touched: set[Name] = set()
        try:
            async for items, _version in self._api.chunks(kind, namespace, selector):
                for item in items:
                    seen.add(reference(item))
                    touched |= self.notice(None, item)
        except NotFoundError:
            # Its CRD may be installed later, or have gone with all its objects.
            if kind not in OPTIONAL_KINDS:
                raise
        for key, uid in before.items():
            live = self._objects.get(key)
            # What came or was replaced since the listing began is not gone.
            if key not in seen and live is not None and live["metadata"]["uid"] == uid:
                logger.info("%s %s/%s went unseen", key.kind, key.namespace, key.name)
                touched |= self._remove(key)
        return touched

    def _store(self, key: Reference, new: Manifest) -> set[Name]:
        self._unlink(key)
        self._objects[key] = new
        labels = new["metadata"].get("labels") or {}
        if key.kind == DEEPSEEK_DEPLOYMENT.kind:
            for model in _models_of(new):
                self._users_of_model[model].add(Name(key.namespace, key.name))
        elif MODEL_LABEL in labels:
            self._by_model[Name(key.namespace, labels[MODEL_LABEL])].add(key)
        elif (owner := _owner_of(labels)) is not None:
            self._by_owner[Name(key.namespace, owner)].add(key)
        return self._concerned(key)

    def _remove(self, key: Reference) -> set[Name]:
        concerned = self._concerned(key)
        self._unlink(key)
        self._objects.pop(key, None)
        self._tolerated.pop(key, None)
        self._tokens.pop(key, None)
        return concerned

    def _unlink(self, key: Reference) -> None:
        old = self._objects.get(key)
        if old is None:
            return
        labels = old["metadata"].get("labels") or {}
        if key.kind == DEEPSEEK_DEPLOYMENT.kind:
            for model in _models_of(old):
                _discard(self._users_of_model, model, Name(key.namespace, key.name))
        elif MODEL_LABEL in labels:
            _discard(self._by_model, Name(key.namespace, labels[MODEL_LABEL]), key)
        elif (owner := _owner_of(labels)) is not None:
            _discard(self._by_owner, Name(key.namespace, owner), key)

    def _concerned(self, key: Reference) -> set[Name]:
        """The objects for which a change of this one may mean work."""
        live = self._objects.get(key)
        if live is None:
            return set()
        if key.kind == DEEPSEEK_DEPLOYMENT.kind:
            return {Name(key.namespace, key.name)}
        labels = live["metadata"].get("labels") or {}
        if MODEL_LABEL in labels:
            return set(self._users_of_model.get(Name(key.namespace, labels[MODEL_LABEL]), ()))
        owner = _owner_of(labels)
        return {Name(key.namespace, owner)} if owner is not None else set()

    def _keep_token(self, key: Reference, manifest: Manifest) -> None:
        """Keep the token of a Secret of ours, which views leave out; of others nothing is kept."""
        if DEPLOYMENT_LABEL not in (manifest["metadata"].get("labels") or {}):
            return
        encoded = (manifest.get("data") or {}).get(TOKEN_KEY, "")
        try:
            self._tokens[key] = base64.b64decode(encoded).decode("ascii")
        except ValueError:
            self._tokens.pop(key, None)

    # Looking.

    def owner(self, name: Name) -> Manifest | None:
        """The object itself; None when it is gone or going: the cluster collects its children."""
        live = self._objects.get(Reference(DEEPSEEK_DEPLOYMENT.kind, *name))
        if live is None or "deletionTimestamp" in live["metadata"]:
            return None
        return live

    def deployments(self, name: Name) -> dict[str, Manifest]:
        """An object's Deployments by tier."""
        found = (self._objects[key] for key in self._by_owner.get(name, ()))
        return {
            live["metadata"]["labels"].get(TIER_LABEL, ""): live
            for live in found
            if live["kind"] == DEPLOYMENT.kind
        }

    async def observe(self, name: Name, spec: DeepSeekDeploymentSpec) -> Observed | None:
        """One object with all that belongs to it."""
        claims: dict[str, Manifest] = {}
        for claim in set().union(*(foreign_claims(tier.spec) for tier in tiers_of(spec))):
            found = await self._api.find(VOLUME_CLAIM, name.namespace, claim)
            if found is not None:
                claims[claim] = view(found)
        missing = await self._missing_secrets(name.namespace, spec)
        found_now = self._remembered(name, spec, claims, missing)
        if found_now is None:
            return None
        return replace(
            found_now,
            missing_authorities=await self._missing_authorities(name.namespace, spec),
            loader_refusals=await self._loader_refusals(found_now),
            pod_refusals=await self._pod_refusals(found_now),
            foreign_autoscalers=await self._foreign_autoscalers(name, found_now),
            external_metrics=await self._external_metrics(spec),
        )

    def glance(self, name: Name, spec: DeepSeekDeploymentSpec, before: Observed) -> Observed | None:
        """The same a moment later, from memory alone."""
        found = self._remembered(name, spec, before.foreign_claims, before.missing_secrets)
        if found is None:
            return None
        return replace(
            found,
            missing_authorities=before.missing_authorities,
            loader_refusals=before.loader_refusals,
            pod_refusals=before.pod_refusals,
            foreign_autoscalers=before.foreign_autoscalers,
            external_metrics=before.external_metrics,
        )

    def _remembered(
        self,
        name: Name,
        spec: DeepSeekDeploymentSpec,
        foreign_claims: Mapping[str, Manifest],
        missing_secrets: tuple[str, ...],
    ) -> Observed | None:
        owner = self.owner(name)
        if owner is None:
            return None
        children = {key: self._objects[key] for key in self._by_owner.get(name, ())}
        cache = {
            key: self._objects[key]
            for model in {cache_name(tier.model.parsed_source) for tier in tiers_of(spec)}
            if model is not None
            for key in self._by_model.get(Name(name.namespace, model), ())
        }
        pods = [live for key, live in children.items() if key.kind == POD.kind]
        readings = self.readings.of(pods)
        return Observed(
            owner=owner,
            children={key: live for key, live in children.items() if key.kind != POD.kind},
            pods=tuple(pod for pod in pods if not _is_quarantined(pod)),
            quarantined=tuple(pod for pod in pods if _is_quarantined(pod)),
            cache={key: live for key, live in cache.items() if key.kind != POD.kind},
            loader_pods=tuple(live for key, live in cache.items() if key.kind == POD.kind),
            foreign_claims=foreign_claims,
            missing_secrets=missing_secrets,
            readings=readings,
            is_deaf=any(reading.is_lost for reading in readings.values()) and self._is_deaf(),
            tolerated=self._tolerated,
        )

    async def _foreign_autoscalers(
        self, name: Name, observed: Observed
    ) -> dict[str, tuple[str, ...]]:
        """Others' autoscalers of the object's Deployments.

        They carry no label of ours, so nobody watches them. They are looked for where somebody
        else wrote `replicas` and no autoscaler of ours did.
        """
        uid = observed.owner["metadata"]["uid"]
        written = {
            key.name
            for key, live in observed.children.items()
            if key.kind == DEPLOYMENT.kind and is_owned_by_another(live)
        } - {
            key.name
            for key in observed.children
            if key.kind in {AUTOSCALER.kind, SCALED_OBJECT.kind}
        }
        if not written:
            return {}
        found: defaultdict[str, list[str]] = defaultdict(list)
        async for items, _version in self._api.chunks(AUTOSCALER, name.namespace):
            for item in items:
                target = (item.get("spec") or {}).get("scaleTargetRef") or {}
                if (
                    target.get("kind") == DEPLOYMENT.kind
                    and target.get("name") in written
                    and not is_owned_by(item, uid)
                ):
                    found[target["name"]].append(item["metadata"]["name"])
        return {target: tuple(sorted(names)) for target, names in found.items()}

    async def _external_metrics(self, spec: DeepSeekDeploymentSpec) -> ExternalMetrics:
        """Who serves external.metrics.k8s.io, looked up now and then for all objects."""
        if spec.autoscaling is None or not self._settings.is_cluster_wide:
            return ExternalMetrics()
        if time.monotonic() >= self._external_metrics_until:
            try:
                found = await self._api.get(API_SERVICE, None, EXTERNAL_METRICS)
                self._known_external_metrics = external_metrics(found)
            except RefusedError:
                # A role of somebody's own may leave this out; the autoscalers say enough.
                self._known_external_metrics = ExternalMetrics()
            self._external_metrics_until = time.monotonic() + EXTERNAL_METRICS_SECONDS
        return self._known_external_metrics

    def _is_deaf(self) -> bool:
        """Whether too many nodes are silent at once to be believed."""
        by_node: defaultdict[str, list[Reading]] = defaultdict(list)
        for keys in self._by_owner.values():
            for key in keys:
                if key.kind == POD.kind:
                    pod = self._objects[key]
                    reading = self.readings.get(pod["metadata"]["uid"])
                    if reading is not None and reading.has_answered:
                        by_node[pod["spec"].get("nodeName", "")].append(reading)
        return is_deaf(by_node)

    def workers(self) -> Iterator[Target]:
        """The worker pods that can be asked how they do."""
        for name, keys in self._by_owner.items():
            secret = token_secret_name(Owner(name.namespace, name.name, ""))
            token = self._tokens.get(Reference(SECRET.kind, name.namespace, secret))
            if token is None:
                continue
            for key in keys:
                if key.kind == POD.kind and is_running(pod := self._objects[key]):
                    yield self._target(name, pod, token)

    def _target(self, name: Name, pod: Manifest, token: str) -> Target:
        address = pod["status"]["podIP"]
        url = self._settings.worker_state_url.format(
            ip=f"[{address}]" if ":" in address else address,
            port=PORT,
            namespace=name.namespace,
            pod=pod["metadata"]["name"],
        )
        return Target(pod["metadata"]["uid"], name.namespace, name.name, url, token)

    async def _missing_secrets(
        self, namespace: str, spec: DeepSeekDeploymentSpec
    ) -> tuple[str, ...]:
        """Pods that lack a Secret for a volume hang without a word, so it is looked for here."""
        missing = []
        fallbacks = [
            (f"credentialsSecret of fallback {fallback.name}", fallback.model.credentials_secret)
            for fallback in spec.fallbacks or ()
        ]
        for field, secret in (
            ("spec.security.apiKeySecret", spec.security.api_key_secret),
            ("spec.model.credentialsSecret", spec.model.credentials_secret),
            *fallbacks,
        ):
            if secret is None:
                continue
            found = await self._api.find(SECRET, namespace, secret.name)
            if found is None:
                missing.append(
                    f"{field} names Secret {secret.name}, which is not there: create it."
                )
            elif secret.key not in (found.get("data") or {}):
                missing.append(f"Secret {secret.name} of {field} has no key {secret.key}: add it.")
        return tuple(missing)

    async def _missing_authorities(
        self, namespace: str, spec: DeepSeekDeploymentSpec
    ) -> dict[str, str]:
        """A loader whose ConfigMap is missing hangs without a word too."""
        missing = {}
        for tier in tiers_of(spec):
            authority = tier.model.certificate_authority
            if authority is None or cache_name(tier.model.parsed_source) is None:
                continue
            name, key = authority.name, authority.key
            found = await self._api.find(CONFIG_MAP, namespace, name)
            if found is None:
                words = f"certificateAuthority names ConfigMap {name}, which is not there: make it."
                missing[tier.model.source] = words
            elif key not in (found.get("data") or {}):
                words = f"ConfigMap {name} of certificateAuthority has no key {key}: add it."
                missing[tier.model.source] = words
        return missing

    async def _loader_refusals(self, observed: Observed) -> dict[str, str]:
        """Why the pods of jobs are refused: a job's status does not tell, only its events do."""
        refusals = {}
        for key, live in observed.cache.items():
            if not waits_for_pod(live):
                continue
            events = await self._refused_pods(key.namespace, f"involvedObject.name={key.name}")
            told = [
                event
                for event in events
                if event["involvedObject"].get("uid") == live["metadata"]["uid"]
            ]
            if told:
                model = live["metadata"]["labels"][MODEL_LABEL]
                refusals[model] = _newest_words(told)
        return refusals

    async def _pod_refusals(self, observed: Observed) -> dict[str, str]:
        """Why pods of Deployments are refused now: their conditions keep the first reason."""
        refusals = {}
        for key, live in observed.children.items():
            condition = refusal_of(live) if key.kind == DEPLOYMENT.kind else None
            if condition is None or names_quota(condition.get("message", "")):
                continue
            events = await self._refused_pods(key.namespace, "involvedObject.kind=ReplicaSet")
            of_deployment = re.compile(re.escape(key.name) + "-[a-z0-9]+")
            told = [
                event
                for event in events
                if of_deployment.fullmatch(event["involvedObject"].get("name", ""))
                and _told_at(event) >= (condition.get("lastTransitionTime") or "")
            ]
            if told:
                refusals[key.name] = _newest_words(told)
        return refusals

    async def _refused_pods(self, namespace: str, owner: str) -> list[Manifest]:
        """The events of a namespace that tell of pods that may not be created."""
        query = {"fieldSelector": f"{owner},reason={FAILED_CREATE}"}
        answer = await self._api.request("GET", EVENT.path(namespace), query=query)
        events: list[Manifest] = answer.get("items") or []
        return events

    # Writing.

    async def carry_out(self, name: Name, plan: Plan) -> tuple[list[Refusal], ApiError | None]:
        """Do what a plan says, all of it at the same time.

        Returns:
            What could not be written, and an error that may pass, if one of them did.
        """
        # First, since clients wait for it.
        failure = await self._climb(name, plan.ladder)
        outcomes = await asyncio.gather(
            *(self._apply(name, manifest) for manifest in plan.apply),
            *(self._create(name, manifest) for manifest in plan.create),
            return_exceptions=True,
        )
        manifests = (*plan.apply, *plan.create)
        refusals: list[Refusal] = []
        for manifest, outcome in zip(manifests, outcomes, strict=True):
            if isinstance(outcome, Refusal):
                refusals.append(outcome)
            elif isinstance(outcome, ApiError):
                key = reference(manifest)
                words = f"The API server refuses {key.kind} {key.name}: {outcome.message}"
                refusals.append(Refusal(key, words))
                if not isinstance(outcome, RefusedError):
                    failure = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        if failure is None:
            for live in plan.delete:
                await self._delete(live)
        return refusals, failure

    async def _climb(self, name: Name, ladder: Decision) -> ApiError | None:
        """Quarantine and end pods. What fails is tried again, and holds up nothing else."""
        outcomes = await asyncio.gather(
            *(self._quarantine(name, sick) for sick in ladder.quarantine),
            *(self._end(ending) for ending in ladder.end),
            return_exceptions=True,
        )
        failure: ApiError | None = None
        for outcome in outcomes:
            if isinstance(outcome, ApiError):
                logger.warning("A pod of %s/%s could not be moved: %s", *name, outcome)
                failure = outcome
            elif outcome is not None:
                raise outcome
        return failure

    async def _quarantine(self, name: Name, sick: Sick) -> None:
        owner = self.owner(name)
        if owner is None:
            return
        metadata = sick.pod["metadata"]
        tier = (metadata.get("labels") or {}).get(TIER_LABEL, "")
        reference_to_owner = owner_reference(name.name, owner["metadata"]["uid"])
        patch = quarantine_patch(
            sick, reference_to_owner, (DEPLOYMENT_LABEL, TIER_LABEL), tier, datetime.now(UTC)
        )
        try:
            answer = await self._api.patch(POD, name.namespace, metadata["name"], patch)
        except (NotFoundError, ConflictError):
            # Another pod of this name, or none: its event tells.
            return
        self._learn(answer, writer=name)

    async def _end(self, ending: Ending) -> None:
        await self._delete(ending.pod, ending.grace_seconds)

    async def _delete(self, live: Manifest, grace_seconds: int | None = None) -> None:
        """Delete an object, and know at once what became of it: the watch may tell it much later.

        Whoever is concerned looks again, as after the watch's word, which is no news any more.
        """
        key, uid = reference(live), live["metadata"]["uid"]
        try:
            remaining = await self._api.delete(
                KIND_OF[key.kind], key.namespace, key.name, uid=uid, grace_seconds=grace_seconds
            )
        except NotFoundError:
            # Not even its kind is served. That may be over soon, and is no word about this object.
            self._departed.add(live)
        else:
            if remaining is not None:
                self._learn(remaining)
                return
            self._departed.add_for_good(uid)
        known = self._objects.get(key)
        # Another one may have got its name meanwhile.
        if known is not None and known["metadata"]["uid"] == uid:
            for name in self._remove(key):
                self._wake(name)

    async def write_status(self, name: Name, status: dict[str, Any]) -> None:
        """Replace the fields of the status; those that are not given are removed."""
        live = self._objects.get(Reference(DEEPSEEK_DEPLOYMENT.kind, *name))
        if live is None:
            return
        changes = {"status": _replacing(live.get("status") or {}, status)}
        try:
            answer = await self._api.patch(DEEPSEEK_DEPLOYMENT, *name, changes, "status")
        except NotFoundError:
            return
        # The answer may hold a change of the spec that no event has told yet.
        self._learn(answer)

    def count_retries(self, name: Name) -> None:
        """The status that was just written counts the batches that were tried again so far."""
        keys = self._by_owner.get(name, ())
        self.readings.counted(self._objects[key] for key in keys if key.kind == POD.kind)

    async def post(self, name: Name, notes: list[Note]) -> None:
        """Post Kubernetes events. They are for people: one that is refused is only logged."""
        owner = self._objects.get(Reference(DEEPSEEK_DEPLOYMENT.kind, *name))
        for note in notes if owner is not None else ():
            try:
                await self._api.create(EVENT, _event(owner or {}, note, self._settings.holder))
            except ApiError as error:
                logger.warning("Could not post event %s of %s: %s", note.reason, name, error)

    async def _apply(self, name: Name, manifest: Manifest) -> Refusal | None:
        key = reference(manifest)
        kind = KIND_OF[key.kind]
        known = self._objects.get(key)
        if known is not None and _is_of_another(name, known):
            # The server would take it: both are written by the same manager.
            return Refusal(key, _taken(key), is_taken=True)
        if known is not None:
            answer = await self._apply_as_known(kind, manifest)
        else:
            found = await self._apply_new(name, kind, manifest)
            if found is None:
                return Refusal(key, _taken(key), is_taken=True)
            answer = found
        self._learn(answer, writer=name)
        left = deviations(manifest, view(answer))
        if left:
            logger.warning(
                "%s %s/%s came back from the API server with %s",
                key.kind, key.namespace, key.name, ", ".join(left),
            )  # fmt: skip
            self._tolerated[key] = left
        else:
            self._tolerated.pop(key, None)
        return None

    async def _apply_new(self, name: Name, kind: Kind, manifest: Manifest) -> Manifest | None:
        """Apply an object that is not known; None where somebody else has one of its name.

        Their fields conflict with ours, above all the selector.
        """
        key = reference(manifest)
        try:
            return await self._apply_as_known(kind, manifest, force=False)
        except ConflictError:
            pass
        found = await self._api.find(kind, key.namespace, key.name)
        if found is not None and not self._is_ours(name, manifest, found):
            return None
        return await self._apply_as_known(kind, manifest)

    async def _apply_as_known(
        self, kind: Kind, manifest: Manifest, *, force: bool = True
    ) -> Manifest:
        """Apply; a route without its retries where the API server does not know them."""
        try:
            return await self._api.apply(kind, manifest, force=force)
        except ApiError as error:
            plainer = without_retries(manifest) if kind == HTTP_ROUTE else None
            if plainer is None or "field not declared in schema" not in error.message:
                raise
        return await self._api.apply(kind, plainer, force=force)

    async def _create(self, name: Name, manifest: Manifest) -> Refusal | None:
        key = reference(manifest)
        kind = KIND_OF[key.kind]
        if kind == SECRET:
            token = base64.b64encode(secrets.token_urlsafe(32).encode()).decode()
            manifest = {**manifest, "data": {TOKEN_KEY: token}}
        answer = await self._api.create(kind, manifest)
        if answer is None:
            # Somebody was faster: another operator, or a person.
            if kind == JOB:
                return None
            answer = await self._api.find(kind, key.namespace, key.name)
            if answer is None:
                raise ClusterBusyError(f"{key.kind} {key.name} comes and goes")
            if not self._is_ours(name, manifest, answer):
                return Refusal(key, _taken(key), is_taken=True)
            if kind == SERVICE_ACCOUNT:
                answer = await self._api.apply(kind, manifest)
            elif TOKEN_KEY not in (answer.get("data") or {}):
                data = {"data": manifest["data"]}
                answer = await self._api.patch(kind, key.namespace, key.name, data)
        self._learn(answer, writer=name)
        return None

    def _learn(self, answer: Manifest, writer: Name | None = None) -> None:
        """Take in the answer to a write; the writer itself looks again anyway."""
        for name in self.notice(None, answer) - {writer}:
            self._wake(name)

    def _is_ours(self, name: Name, manifest: Manifest, found: Manifest) -> bool:
        """Whether a live object of the right name is the child, and not somebody's own."""
        labels = manifest["metadata"]["labels"]
        if MODEL_LABEL in labels:
            theirs = found["metadata"].get("labels") or {}
            return theirs.get(MANAGED_BY_LABEL) == MANAGED_BY
        owner = self.owner(name)
        return owner is not None and is_owned_by(found, owner["metadata"]["uid"])


def _taken(key: Reference) -> str:
    return (
        f"{key.kind} {key.name} exists and does not belong to this object. Delete it, or give"
        " the DeepSeekDeployment another name."
    )


def _version(manifest: Manifest) -> Manifest:
    return {"resourceVersion": manifest["metadata"]["resourceVersion"]}


def _models_of(owner: Manifest) -> set[Name]:
    """The caches that an object uses."""
    spec = owner.get("spec") or {}
    models = [spec.get("model"), *(f.get("model") for f in spec.get("fallbacks") or [])]
    sources = [(model or {}).get("source", "") for model in models]
    names = {cache_name(parse_source(source)) for source in sources if is_source(source)}
    return {Name(owner["metadata"]["namespace"], name) for name in names if name is not None}


def _replacing(old: Manifest, new: Manifest) -> Manifest:
    """The merge patch that turns one value into another: what is not given is removed.

    A merge patch keeps what it does not name, in maps within maps too.
    """
    patch: Manifest = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        is_map = isinstance(value, dict) and isinstance(before, dict)
        patch[key] = _replacing(before or {}, value) if is_map else value
    return patch


def _owner_of(labels: Mapping[str, str]) -> str | None:
    """Name of the DeepSeekDeployment that an object belongs to."""
    return labels.get(DEPLOYMENT_LABEL) or labels.get(QUARANTINE_LABEL)


def _is_of_another(name: Name, live: Manifest) -> bool:
    """Whether a live child belongs to an object of another name, whose tier is called the same."""
    labels = live["metadata"].get("labels") or {}
    return MODEL_LABEL not in labels and _owner_of(labels) not in {None, name.name}


def _is_quarantined(pod: Manifest) -> bool:
    return QUARANTINE_LABEL in (pod["metadata"].get("labels") or {})


def _discard(index: defaultdict[Name, set[Any]], name: Name, value: Any) -> None:
    index[name].discard(value)
    if not index[name]:
        del index[name]


def _event(owner: Manifest, note: Note, instance: str) -> Manifest:
    """A Kubernetes event about an object.

    Its name is the same for the same news, so that a repeated request makes no second one.
    """
    metadata = owner["metadata"]
    now = datetime.now(UTC)
    moment = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    digest = hashlib.sha256(f"{metadata['uid']}{note}{moment}".encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "type": note.type,
        "reason": note.reason,
        "message": note.message[:1024],
        "action": "Reconcile",
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
        "source": {"component": "deepseek-operator"},
        "reportingComponent": "deepseek-operator",
        "reportingInstance": instance[:128],
    }


def _told_at(event: Manifest) -> str:
    return event.get("lastTimestamp") or ""


def _newest_words(events: list[Manifest]) -> str:
    """Why a pod was refused last; a controller puts words of its own before the API server's."""
    message = str(max(events, key=_told_at).get("message", ""))
    return message.rpartition("Error creating: ")[2]
