"""Requests to the API server: credentials, one connection pool, bounded retries, counting.

kubernetes.aio brings credentials, TLS and the pool. Its typed models are not used: the
operator works on JSON as it is, and reading thousands of objects into models costs memory.
Every request of this process, kopf's lists and watches included, passes `trace` and is
counted as the role must allow it, by verb and resource.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from yarl import URL

from deepseek_operator.errors import (
    ApiError,
    ClusterBusyError,
    ConflictError,
    NotFoundError,
    api_error,
)
from deepseek_operator.kinds import FIELD_MANAGER, Kind, Manifest
from deepseek_operator.settings import Settings

APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
WRITER = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Ignore"}
"""In every write. The server would look for unknown fields only to warn of them."""
FIELD_CONFLICT = "FieldManagerConflict"
LIST_CHUNK = 500
"""Objects in one answer to a list: bounds the memory of a listing."""

SILENT_WATCH_SECONDS = 70.0
"""The API server sends a bookmark every minute; a watch without one is dead."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
LONGEST_RETRY_AFTER_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 2.0
"""A pause above this is not slept through here: the caller's turn would stand still with it."""
_VERBS = {"post": "create", "put": "update", "patch": "patch", "delete": "delete"}


@dataclass(frozen=True)
class Attributes:
    """A request as RBAC sees it."""

    verb: str
    resource: str
    """E.g. `deployments.apps` or `deepseekdeployments.deepseek.dev/status`; a path for requests
    about no resource, such as `/version`."""


class Recorder(Protocol):
    """Whoever counts requests."""

    def __call__(self, attributes: Attributes, code: str) -> None:
        """Take note of one finished request; `code` is the status or `error`."""


def attributes_of(method: str, path: str, query: Mapping[str, str]) -> Attributes:
    """Verb and resource of a request, by the rules of the API server's request info.

    Source: k8s.io/apiserver/pkg/endpoints/request/requestinfo.go.
    """
    method = method.lower()
    parts = path.strip("/").split("/")
    is_core = parts[:1] == ["api"]
    rest = parts[2:] if is_core else parts[3:]
    if parts[0] not in {"api", "apis"} or not rest:
        return Attributes(method, "/" + "/".join(parts))
    group = "" if is_core else parts[1]
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    plural = rest[0] + (f".{group}" if group else "")
    resource = plural + (f"/{rest[2]}" if len(rest) > 2 else "")
    if method in {"get", "head"}:
        is_collection = len(rest) == 1
        if query.get("watch") in {"true", "1"}:
            verb = "watch"
        else:
            verb = "list" if is_collection else "get"
    else:
        verb = _VERBS.get(method, method)
    return Attributes(verb, resource)


def pause_seconds(
    attempt: int, retry_after_seconds: float | None, jitter: Callable[[], float] = random.random
) -> float:
    """How long to wait before try `attempt + 1`: exponential with jitter.

    It is never shorter than what the server asked for, up to `LONGEST_RETRY_AFTER_SECONDS`.
    """
    longest: float = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)
    pause = longest * (0.5 + jitter() / 2)
    if retry_after_seconds is not None:
        asked = min(retry_after_seconds, LONGEST_RETRY_AFTER_SECONDS)
        pause = max(pause, asked + jitter() * FIRST_PAUSE_SECONDS)
    return pause


async def load_credentials() -> Configuration:
    """The pod's service account, or the kubeconfig file of a person."""
    configuration = Configuration()
    try:
        kube_config.load_incluster_config(client_configuration=configuration)
    except kube_config.ConfigException:
        await kube_config.load_kube_config(client_configuration=configuration)
    return configuration


def trace(configuration: Configuration, record: Recorder) -> aiohttp.TraceConfig:
    """Hooks of an aiohttp session that add the current token and count each request."""

    async def authorize(_session: Any, _context: Any, request: Any) -> None:
        token = await configuration.get_api_key_with_prefix("BearerToken")
        if token and "Authorization" not in request.headers:
            request.headers["Authorization"] = token

    async def count(_session: Any, _context: Any, request: Any) -> None:
        url = request.url
        attributes = attributes_of(request.method, url.path, url.query)
        response = getattr(request, "response", None)
        record(attributes, str(response.status) if response is not None else "error")

    hooks = aiohttp.TraceConfig()
    hooks.on_request_start.append(authorize)
    hooks.on_request_end.append(count)
    hooks.on_request_exception.append(count)
    return hooks


class Api:
    """The API server, as far as this operator needs it.

    Reads and server-side applies are repeatable, so each request is retried a bounded number of
    times with jitter; then the error reaches the caller, who has its own back-off per object.
    """

    def __init__(self, configuration: Configuration, settings: Settings, record: Recorder) -> None:
        configuration.trace_configs = [trace(configuration, record)]
        configuration.connection_pool_maxsize = 4 * settings.max_concurrent_reconciles
        configuration.retries = None
        self.configuration = configuration
        self._retries = settings.api_retries
        self._timeout = aiohttp.ClientTimeout(total=settings.api_timeout_seconds, sock_connect=5)
        self._rest = RESTClientObject(configuration)

    @classmethod
    async def connect(cls, settings: Settings, record: Recorder) -> Api:
        """Load the credentials and make the pool; no request is sent yet."""
        return cls(await load_credentials(), settings, record)

    async def close(self) -> None:
        """Close all connections."""
        await self._rest.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Manifest | None:
        """One object, or None where there is none."""
        try:
            return await self.request("GET", kind.path(namespace, name))
        except NotFoundError:
            return None

    async def find(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """The same by a list of one, for kinds whose right to `list` is needed anyway."""
        query = {"fieldSelector": f"metadata.name={name}"}
        answer = await self.request("GET", kind.path(namespace), query=query)
        for item in answer.get("items") or []:
            return {"apiVersion": kind.api_version, "kind": kind.kind, **item}
        return None

    async def chunks(
        self,
        kind: Kind,
        namespace: str | None,
        label_selector: str = "",
        *,
        fields: str = "",
        limit: int = LIST_CHUNK,
    ) -> AsyncIterator[tuple[list[Manifest], str]]:
        """All objects of a kind, `limit` at a time, each with the list's resourceVersion.

        A list that grew too old on the way (410) is started again from its beginning.
        """
        token = ""
        while True:
            query = {"limit": str(limit)}
            if label_selector:
                query["labelSelector"] = label_selector
            if fields:
                query["fieldSelector"] = fields
            if token:
                query["continue"] = token
            try:
                answer = await self.request("GET", kind.path(namespace), query=query)
            except NotFoundError as error:
                if error.status != 410 or not token:
                    raise
                token = ""
                continue
            metadata = answer.get("metadata", {})
            items = answer.get("items") or []
            for item in items:
                # Items of a list carry neither.
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
            yield items, metadata.get("resourceVersion", "0")
            token = metadata.get("continue") or ""
            if not token:
                return

    async def watch(
        self, kind: Kind, version: str, *, fields: str, seconds: int
    ) -> AsyncGenerator[tuple[str, Manifest]]:
        """What happens to the objects of a kind in the whole cluster, bookmarks among it.

        The server ends the stream after `seconds`; then, or when it falls silent, this ends too.

        Raises:
            NotFoundError: The version is too old (410): list again.
            ApiError: Whatever else the server says instead of events.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        if fields:
            query["fieldSelector"] = fields
        path = kind.path(None)
        url = str(URL(self.configuration.host + path).with_query(query))
        silence = min(SILENT_WATCH_SECONDS, seconds + 3)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=silence)
        try:
            answer = await self._rest.request(
                "GET", url, headers={"Accept": "application/json"}, _request_timeout=timeout
            )
            response = answer.response
            if response.status >= 400:
                data = await response.read()
                raise _error_of(f"GET {path}", response.status, data, response.headers)
            try:
                async for line in _lines(response.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        code = int(event["object"].get("code", 500))
                        raise _error_of(
                            f"watch {path}", code, json.dumps(event["object"]).encode(), {}
                        )
                    yield event["type"], event["object"]
            finally:
                response.close()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ClusterBusyError(f"watch {path}: {error!r}") from error

    async def apply(self, kind: Kind, manifest: Manifest, *, force: bool = True) -> Manifest:
        """Server-side apply: take over the manifest's fields, leave all others alone.

        Raises:
            ConflictError: Without `force`, when another writer owns one of the fields with
                another value.
        """
        metadata = manifest["metadata"]
        return await self.request(
            "PATCH",
            kind.path(metadata["namespace"], metadata["name"]),
            query={**WRITER, "force": str(force).lower()},
            body=manifest,
            content_type=APPLY,
        )

    async def create(self, kind: Kind, manifest: Manifest) -> Manifest | None:
        """Create an object; None where one of its name exists."""
        try:
            return await self.request(
                "POST",
                kind.path(manifest["metadata"]["namespace"]),
                query=WRITER,
                body=manifest,
            )
        except ConflictError:
            return None

    async def replace(self, kind: Kind, manifest: Manifest) -> Manifest:
        """Replace an object, if nobody changed it since `metadata.resourceVersion`."""
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self.request("PUT", path, query=WRITER, body=manifest)

    async def patch(
        self, kind: Kind, namespace: str, name: str, changes: Manifest, subresource: str = ""
    ) -> Manifest:
        """Merge-patch an object or its subresource."""
        return await self.request(
            "PATCH",
            kind.path(namespace, name, subresource),
            query=WRITER,
            body=changes,
            content_type=MERGE_PATCH,
        )

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        """Delete the object of this uid in the background; nothing happens to another one.

        Returns:
            The object, where its finalizers or its time to end keep it for now; None where it is
            gone for good.

        Raises:
            NotFoundError: No such kind is served, which says nothing of the object.
            ConflictError: Something else than its uid speaks against it.
        """
        body: Manifest = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            answer = await self.request("DELETE", kind.path(namespace, name), body=body)
        except NotFoundError as error:
            # The API server's own word for objects; who serves no such path has none.
            if error.reason != "NotFound":
                raise
            return None
        except ConflictError:
            found = await self.find(kind, namespace, name)
            if found is None or found["metadata"]["uid"] != uid:
                return None
            if "deletionTimestamp" not in found["metadata"]:
                raise
            return found
        return answer if _remains(answer) else None

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
        retries: int | None = None,
    ) -> Manifest:
        """Send a request and return the answer's JSON.

        Conflicts are retried for patches that name no version: they are a race inside the server,
        not news for the caller, unless they are about the owners of fields.

        Raises:
            ApiError: The class of the last answer, when all tries failed.
        """
        retries = self._retries if retries is None else retries
        attempt = 0
        while True:
            try:
                return await self._once(method, path, query or {}, body, content_type)
            except (ClusterBusyError, ConflictError) as error:
                is_news = isinstance(error, ConflictError) and (
                    method != "PATCH"
                    or FIELD_CONFLICT in error.causes
                    or "resourceVersion" in (body or {}).get("metadata", {})
                )
                pause = pause_seconds(attempt, error.retry_after_seconds)
                if is_news or attempt >= retries or pause > LONGEST_WAIT_SECONDS:
                    raise
                await asyncio.sleep(pause)
                attempt += 1

    async def _once(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Manifest | None,
        content_type: str,
    ) -> Manifest:
        url = str(URL(self.configuration.host + path).with_query(query))
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            response = await self._rest.request(
                method, url, headers=headers, body=body, _request_timeout=self._timeout
            )
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterBusyError(f"{method} {path}: {error!r}") from error
        if response.status < 400:
            answer = _object_in(data)
            if answer is None:
                # From something on the way there, and so perhaps not the next time.
                raise ClusterBusyError(f"{method} {path}: no JSON object: {data[:64]!r}")
            return answer
        raise _error_of(f"{method} {path}", response.status, data, response.headers)


def _object_in(data: bytes) -> Manifest | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _remains(answer: Manifest) -> bool:
    """Whether the answer to a delete is an object that stays for now.

    Of one that is gone the server answers a Status, or for some kinds what it was at the end.

    Source: k8s.io/apiserver/pkg/registry/generic/registry/store.go, `finalizeDelete` and
    `ShouldDeleteDuringUpdate`.
    """
    metadata = answer.get("metadata") or {}
    is_object = answer.get("kind") != "Status"
    return is_object and bool(
        metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    )


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream, however long they are."""
    rest = bytearray()
    async for chunk in stream.iter_any():
        rest += chunk
        *whole, last = rest.split(b"\n")
        for line in whole:
            if line:
                yield bytes(line)
        rest = bytearray(last)


def _error_of(what: str, status: int, data: bytes, headers: Mapping[str, str]) -> ApiError:
    message, reason = data[:256].decode(errors="replace"), ""
    causes: frozenset[str] = frozenset()
    retry_after = headers.get("Retry-After")
    answer = _object_in(data)
    if answer is not None and answer.get("kind") == "Status":
        message, reason = answer.get("message", ""), answer.get("reason", "")
        details = answer.get("details") or {}
        causes = frozenset(cause.get("reason", "") for cause in details.get("causes") or [])
        retry_after = retry_after or details.get("retryAfterSeconds")
    try:
        retry_after_seconds = float(retry_after) if retry_after else None
    except ValueError:
        retry_after_seconds = None
    return api_error(
        status,
        message or f"{what}: HTTP {status}",
        reason=reason,
        causes=causes,
        retry_after_seconds=retry_after_seconds,
    )
