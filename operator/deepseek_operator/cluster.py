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
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.source import is_source, parse_source
from deepseek_operator.api import Api
from deepseek_operator.drift import deviations
from deepseek_operator.errors import (
    ApiError,
    ClusterBusyError,
    ConflictError,
    NotFoundError,
    RefusedError,
)
from deepseek_operator.kinds import (
    DEEPSEEK_DEPLOYMENT,
    EVENT,
    JOB,
    KIND_OF,
    POD,
    SECRET,
    SERVICE_ACCOUNT,
    VOLUME_CLAIM,
    WATCHED_KINDS,
    Kind,
    Manifest,
    Reference,
    reference,
)
from deepseek_operator.loader import MODEL_LABEL
from deepseek_operator.plan import Observed, Plan, is_owned_by
from deepseek_operator.render import (
    DEPLOYMENT_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    MANAGED_BY_SELECTOR,
    TOKEN_KEY,
    cache_name,
    claim_name,
    has_foreign_claim,
)
from deepseek_operator.settings import Settings
from deepseek_operator.status import Note, Refusal
from deepseek_operator.views import matters, view

logger = logging.getLogger(__name__)

REMEMBERED_DELETIONS = 10_000


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
        self._deleted: OrderedDict[str, Manifest] = OrderedDict()
        """By uid, what was last said of objects that went away: an answer to an own write may
        come after that, and must not bring them back."""

    @property
    def names(self) -> list[Name]:
        """All DeepSeekDeployments."""
        kind = DEEPSEEK_DEPLOYMENT.kind
        return [Name(key.namespace, key.name) for key in self._objects if key.kind == kind]

    # Filling the picture.

    async def resync(self) -> set[Name]:
        """List everything, and return the objects for which something had been missed.

        Raises:
            ApiError: A kind could not be listed.
        """
        touched: set[Name] = set()
        for kind in WATCHED_KINDS:
            for namespace in self._settings.watch_namespaces or (None,):
                touched |= await self._resync_kind(kind, namespace)
        return touched

    def notice(self, event_type: str | None, manifest: Manifest) -> set[Name]:
        """Take a watch event in, and return the objects that have to be looked at."""
        key = reference(manifest)
        uid = manifest["metadata"]["uid"]
        old = self._objects.get(key)
        if event_type == "DELETED":
            # Also said of an object that lost the label it is watched by, and lives on.
            self._deleted[uid] = {"metadata": _version(manifest)}
            while len(self._deleted) > REMEMBERED_DELETIONS:
                self._deleted.popitem(last=False)
            if old is None or old["metadata"]["uid"] != uid:
                return set()
            return self._remove(key)
        last = self._deleted.get(uid, old)
        if last is not None and not _is_newer(manifest, last):
            return set()
        self._deleted.pop(uid, None)
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
        async for items, _version in self._api.chunks(kind, namespace, selector):
            for item in items:
                seen.add(reference(item))
                touched |= self.notice(None, item)
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
            model = _model_of(new)
            if model is not None:
                self._users_of_model[model].add(Name(key.namespace, key.name))
        elif MODEL_LABEL in labels:
            self._by_model[Name(key.namespace, labels[MODEL_LABEL])].add(key)
        elif DEPLOYMENT_LABEL in labels:
            self._by_owner[Name(key.namespace, labels[DEPLOYMENT_LABEL])].add(key)
        return self._concerned(key)

    def _remove(self, key: Reference) -> set[Name]:
        concerned = self._concerned(key)
        self._unlink(key)
        self._objects.pop(key, None)
        self._tolerated.pop(key, None)
        return concerned

    def _unlink(self, key: Reference) -> None:
        old = self._objects.get(key)
        if old is None:
            return
        labels = old["metadata"].get("labels") or {}
        if key.kind == DEEPSEEK_DEPLOYMENT.kind:
            model = _model_of(old)
            if model is not None:
                _discard(self._users_of_model, model, Name(key.namespace, key.name))
        elif MODEL_LABEL in labels:
            _discard(self._by_model, Name(key.namespace, labels[MODEL_LABEL]), key)
        elif DEPLOYMENT_LABEL in labels:
            _discard(self._by_owner, Name(key.namespace, labels[DEPLOYMENT_LABEL]), key)

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
        return (
            {Name(key.namespace, labels[DEPLOYMENT_LABEL])} if DEPLOYMENT_LABEL in labels else set()
        )

    # Looking.

    def owner(self, name: Name) -> Manifest | None:
        """The object itself; None when it is gone or going: the cluster collects its children."""
        live = self._objects.get(Reference(DEEPSEEK_DEPLOYMENT.kind, *name))
        if live is None or "deletionTimestamp" in live["metadata"]:
            return None
        return live

    async def observe(self, name: Name, spec: DeepSeekDeploymentSpec) -> Observed | None:
        """One object with all that belongs to it."""
        claim = None
        if has_foreign_claim(spec):
            found = await self._api.find(VOLUME_CLAIM, name.namespace, claim_name(spec) or "")
            claim = view(found) if found is not None else None
        missing = await self._missing_secrets(name.namespace, spec)
        return self._remembered(name, spec, claim, missing)

    def glance(self, name: Name, spec: DeepSeekDeploymentSpec, before: Observed) -> Observed | None:
        """The same a moment later, from memory alone."""
        return self._remembered(name, spec, before.foreign_claim, before.missing_secrets)

    def _remembered(
        self,
        name: Name,
        spec: DeepSeekDeploymentSpec,
        foreign_claim: Manifest | None,
        missing_secrets: tuple[str, ...],
    ) -> Observed | None:
        owner = self.owner(name)
        if owner is None:
            return None
        children = {key: self._objects[key] for key in self._by_owner.get(name, ())}
        model = cache_name(spec.model.parsed_source)
        cached = self._by_model.get(Name(name.namespace, model), ()) if model else ()
        cache = {key: self._objects[key] for key in cached}
        return Observed(
            owner=owner,
            children={key: live for key, live in children.items() if key.kind != POD.kind},
            pods=tuple(live for key, live in children.items() if key.kind == POD.kind),
            cache={key: live for key, live in cache.items() if key.kind != POD.kind},
            loader_pods=tuple(live for key, live in cache.items() if key.kind == POD.kind),
            foreign_claim=foreign_claim,
            missing_secrets=missing_secrets,
            tolerated=self._tolerated,
        )

    async def _missing_secrets(
        self, namespace: str, spec: DeepSeekDeploymentSpec
    ) -> tuple[str, ...]:
        """Pods that lack a Secret for a volume hang without a word, so it is looked for here."""
        missing = []
        for field, secret in (
            ("spec.security.apiKeySecret", spec.security.api_key_secret),
            ("spec.model.credentialsSecret", spec.model.credentials_secret),
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

    # Writing.

    async def carry_out(self, name: Name, plan: Plan) -> tuple[list[Refusal], ApiError | None]:
        """Do what a plan says, all of it at the same time.

        Returns:
            What could not be written, and an error that may pass, if one of them did.
        """
        outcomes = await asyncio.gather(
            *(self._apply(name, manifest) for manifest in plan.apply),
            *(self._create(name, manifest) for manifest in plan.create),
            return_exceptions=True,
        )
        manifests = (*plan.apply, *plan.create)
        refusals: list[Refusal] = []
        failure: ApiError | None = None
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
                key = reference(live)
                kind = KIND_OF[key.kind]
                await self._api.delete(kind, key.namespace, key.name, uid=live["metadata"]["uid"])
        return refusals, failure

    async def write_status(self, name: Name, status: dict[str, Any]) -> None:
        """Replace the fields of the status; those that are not given are removed."""
        live = self._objects.get(Reference(DEEPSEEK_DEPLOYMENT.kind, *name))
        if live is None:
            return
        gone = {key: None for key in live.get("status") or {} if key not in status}
        changes = {"status": {**status, **gone}}
        try:
            answer = await self._api.patch(DEEPSEEK_DEPLOYMENT, *name, changes, "status")
        except NotFoundError:
            return
        # The answer may hold a change of the spec that no event has told yet.
        self._learn(answer)

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
        if key in self._objects:
            answer = await self._api.apply(kind, manifest)
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
            return await self._api.apply(kind, manifest, force=False)
        except ConflictError:
            pass
        found = await self._api.find(kind, key.namespace, key.name)
        if found is not None and not self._is_ours(name, manifest, found):
            return None
        return await self._api.apply(kind, manifest)

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
        for name in self.notice("MODIFIED", answer) - {writer}:
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


def _is_newer(manifest: Manifest, old: Manifest) -> bool:
    """Whether a manifest is of a later version; versions can be compared since Kubernetes 1.35."""
    ours, theirs = old["metadata"]["resourceVersion"], manifest["metadata"]["resourceVersion"]
    if ours.isdecimal() and theirs.isdecimal():
        return int(theirs) > int(ours)
    return bool(theirs != ours)


def _model_of(owner: Manifest) -> Name | None:
    """The cache that an object uses."""
    source = ((owner.get("spec") or {}).get("model") or {}).get("source", "")
    name = cache_name(parse_source(source)) if is_source(source) else None
    return Name(owner["metadata"]["namespace"], name) if name is not None else None


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
