"""The operator's settings: read once from the environment, never changed.

The chart writes one variable per field, and its values, their schema and
docs/reference/settings.md are generated from the fields below. The prefix ends in two
underscores because Kubernetes injects variables such as DEEPSEEK_OPERATOR_PORT for a
Service of that name, and those must not be taken for settings.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from deepseek_operator.errors import SettingsError

PREFIX = "DEEPSEEK_OPERATOR__"
"""What every variable starts with; the rest is the field's name in capitals."""

DnsLabel = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
]
Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseModel):
    """What an installation decides for all its deployments."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespace: DnsLabel = "deepseek-system"
    """Namespace the operator runs in. Its Lease lives there, and the workers' NetworkPolicies
    let it in."""

    watch_namespaces: tuple[DnsLabel, ...] = ()
    """Namespaces to serve. Empty serves the whole cluster, which needs a ClusterRole; with names a
    Role in each of them is enough."""

    identity: str = ""
    """Name of this process in the Lease. Empty takes the host's name and a random suffix, so
    that two processes never share one."""

    pod_uid: str = ""
    """Uid of the pod that this process runs in, whose name is then the identity. The Lease belongs
    to the pod and goes with it, so that nobody waits for an operator that was uninstalled."""

    prometheus_namespaces: tuple[DnsLabel, ...] = ("monitoring",)
    """Namespaces whose pods may scrape the workers."""

    client_namespaces: tuple[DnsLabel | Literal["*"], ...] = ()
    """Namespaces whose pods may ask the models, besides the deployment's own; a gateway's belongs
    here. `*` lets every pod in."""

    keda: bool = False
    """Whether KEDA is installed and objects may say `provider: keda`. The operator may then write
    ScaledObjects."""

    gateway_api: bool = False
    """Whether the CRDs of the Gateway API are installed and objects may ask for an HTTPRoute. The
    Gateway's own namespace belongs among those whose pods may ask the models."""

    prometheus_url: str = Field(
        "http://prometheus-operated.monitoring.svc:9090", pattern=r"^https?://\S+$"
    )
    """Where KEDA asks for the workers' metrics. prometheus-adapter has an address of its own."""

    worker_image: str = Field("localhost/deepseek-worker:dev", min_length=1)
    """Image of the worker and of the model loader, unless a deployment names its own."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of every pod that the operator makes."""

    hugging_face_endpoint: str = Field("https://huggingface.co", pattern=r"^https?://\S+$")
    """Where hf:// models are fetched: the public hub, or a mirror inside the network."""

    volume_group: int | None = Field(1000, ge=1)
    """Group that owns the volumes of downloaded models. Empty where the platform chooses it, as
    OpenShift does."""

    http_port: int = Field(8080, ge=1, le=65535)
    """Port of /metrics, /healthz and /readyz."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that is logged."""

    log_format: Literal["json", "text"] = "json"
    """JSON has one object a line, for machines; text is for a terminal."""

    lease_name: DnsLabel = "deepseek-operator"
    """Name of the Lease. Operators that serve the same objects must share it."""

    lease_duration_seconds: int = Field(15, ge=3)
    """How long a Lease holds without renewal. The holder gives up after two thirds of it and
    renews after a fifth of it."""

    resync_seconds: Seconds = 300
    """How often everything is listed again, in case a watch lost an event."""

    max_concurrent_reconciles: int = Field(16, ge=1)
    """How many objects are worked on at the same time."""

    api_timeout_seconds: Seconds = 20
    """Time limit of one request to the API server."""

    api_retries: int = Field(2, ge=0)
    """How often a request is repeated at once after 429, 5xx, a conflict or a broken connection.
    After that the object waits for its own next turn, and others have theirs."""

    probe_seconds: Seconds = 2
    """How often each worker is asked how it does. Three silences in a row mean that it does not
    answer."""

    probe_timeout_seconds: Seconds = 1.5
    """Time limit of asking a worker."""

    max_concurrent_probes: int = Field(128, ge=1)
    """How many workers are asked at the same time."""

    worker_state_url: str = Field(
        "http://{ip}:{port}/state", pattern=r"^https?://([^{}\s]|\{(ip|port|namespace|pod)\})+$"
    )
    """Where a worker is asked: `{ip}`, `{port}`, `{namespace}` and `{pod}` stand for the pod's.
    Another address than the pod's own is for fleets that are simulated."""

    watch_seconds: int = Field(300, ge=10)
    """The server ends each watch after this time; it is then opened again where it ended."""

    @property
    def holder(self) -> str:
        """This process in the Lease."""
        return self.identity or _PROCESS_IDENTITY

    @property
    def is_cluster_wide(self) -> bool:
        """Whether objects of every namespace are served."""
        return not self.watch_namespaces


_PROCESS_IDENTITY = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
_LISTS = frozenset({"watch_namespaces", "prometheus_namespaces", "client_namespaces"})
_OPTIONAL = frozenset({"volume_group"})


def settings_from(environment: Mapping[str, str]) -> Settings:
    """Parse the variables that start with `PREFIX`.

    Raises:
        SettingsError: A variable is unknown or its value is not allowed; all of them are named.
    """
    values: dict[str, str | tuple[str, ...] | None] = {}
    unknown = []
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        field = variable.removeprefix(PREFIX).lower()
        if field not in Settings.model_fields:
            unknown.append(variable)
        elif field in _LISTS:
            values[field] = tuple(part.strip() for part in text.split(",") if part.strip())
        elif text or field not in _OPTIONAL:
            values[field] = text
        else:
            values[field] = None
    if unknown:
        known = ", ".join(variable_name(field) for field in Settings.model_fields)
        raise SettingsError(f"Unknown settings {', '.join(sorted(unknown))}. Known are: {known}.")
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(
            "; ".join(
                f"{variable_name(str(detail['loc'][0]))}={detail['input']!r}: {detail['msg']}"
                for detail in error.errors()
            )
        ) from error


def variable_name(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()
