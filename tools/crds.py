"""The two CRDs: names, scope, printer columns and `/scale` around the contract's schemas."""

from dataclasses import dataclass
from typing import Any

from deepseek_contract import deployment, tenant
from deepseek_contract.schema import ApiModel
from structural import structural


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; those of priority 1 need `-o wide`."""

    name: str
    type: str
    path: str
    description: str
    priority: int = 0

    def manifest(self) -> dict[str, Any]:
        """The entry of `additionalPrinterColumns`."""
        return {
            "name": self.name,
            "type": self.type,
            "jsonPath": self.path,
            "description": self.description,
            "priority": self.priority,
        }


@dataclass(frozen=True)
class CustomResource:
    """What a CRD says besides its schema."""

    model: type[ApiModel]
    kind: str
    plural: str
    short_name: str
    scope: str
    columns: tuple[Column, ...]
    scale: bool = False


def _condition(kind: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{part}'


_AGE = Column("Age", "date", ".metadata.creationTimestamp", "Time since creation")

DEPLOYMENT = CustomResource(
    model=deployment.DeepSeekDeployment,
    kind=deployment.KIND,
    plural=deployment.PLURAL,
    short_name="dsd",
    scope="Namespaced",
    columns=(
        Column("Ready", "string", _condition("Ready", "status"), "Whether requests are answered"),
        Column("Reason", "string", _condition("Ready", "reason"), "Why, in a word"),
        Column("Pods", "integer", ".status.readyReplicas", "Pods that answer"),
        Column("Wanted", "integer", ".status.wantedReplicas", "Pods that there are to be"),
        Column("Model", "string", ".spec.model.source", "Where the model comes from"),
        Column("Device", "string", ".spec.gpu.mode", "What it computes on", 1),
        Column("Memory%", "integer", ".status.memory.usedPercent", "Memory in use", 1),
        Column("Message", "string", _condition("Ready", "message"), "Why, for people", 1),
        _AGE,
    ),
    scale=True,
)

TENANT = CustomResource(
    model=tenant.DeepSeekTenant,
    kind=tenant.KIND,
    plural=tenant.PLURAL,
    short_name="dst",
    scope="Cluster",
    columns=(
        Column("Ready", "string", _condition("Ready", "status"), "Whether its quota is dealt"),
        Column("Reason", "string", _condition("Ready", "reason"), "Why, in a word"),
        Column("Min%", "integer", ".spec.gpuMemory.minPercent", "What it is guaranteed"),
        Column("Max%", "integer", ".spec.gpuMemory.maxPercent", "What it never exceeds"),
        Column("Quota%", "integer", ".status.quota.percent", "What it may use now"),
        Column("Used%", "integer", ".status.used.percent", "What its pods hold now"),
        Column("Over", "string", _condition("OverQuota", "reason"), "Whether pods must end", 1),
        Column("Message", "string", _condition("Ready", "message"), "Why, for people", 1),
        _AGE,
    ),
)

ALL = (DEPLOYMENT, TENANT)


def custom_resource_definition(
    resource: CustomResource, *, group: str = deployment.GROUP
) -> dict[str, Any]:
    """The CRD's manifest."""
    subresources: dict[str, Any] = {"status": {}}
    if resource.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{group}"},
        "spec": {
            "group": group,
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": [resource.short_name],
                "categories": ["deepseek"],
            },
            "scope": resource.scope,
            "versions": [
                {
                    "name": deployment.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": structural(resource.model)},
                    "subresources": subresources,
                    "additionalPrinterColumns": [column.manifest() for column in resource.columns],
                }
            ],
        },
    }
