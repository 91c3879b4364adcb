"""The text of generated YAML: CRDs on their own and as templates of the chart."""

from typing import Any

import yaml

from crds import CustomResource, custom_resource_definition

HEADER = "# Generated from contract/deepseek_contract by tools/generate.py; do not edit.\n"


def crd(resource: CustomResource) -> str:
    """A CRD for `kubectl apply --server-side -f`."""
    return HEADER + dumped(custom_resource_definition(resource))


def chart_crd(resource: CustomResource) -> str:
    """A CRD as a template: upgraded with the chart, kept when the chart is uninstalled.

    Raises:
        ValueError: The CRD's text would be taken for a template's action.
    """
    manifest = custom_resource_definition(resource)
    manifest["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    text = dumped(manifest)
    if "{{" in text:
        raise ValueError(f"{resource.kind}: a text of its schema holds {{{{, which helm would run")
    labels = '  labels:\n    {{- include "deepseek-operator.labels" . | nindent 4 }}\n'
    return (
        HEADER
        + "{{- if .Values.crds.enabled }}\n"
        + text.replace("metadata:\n", f"metadata:\n{labels}", 1)
        + "{{- end }}\n"
    )


class _Dumper(yaml.SafeDumper):
    """Repeats what is used twice instead of naming it, and indents lists."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def dumped(manifest: Any) -> str:
    """YAML in block style with keys in the order given."""
    text: str = yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return text
