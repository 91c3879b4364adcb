"""Which model is served: its source, how it is downloaded and kept, and how precisely it computes.

`deployment.py` has one for the primary and one for each fallback.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from deepseek_contract import source as model_source
from deepseek_contract.schema import ApiModel, Rule, UpdateRule, keyed, no_doubles
from deepseek_contract.text import DataKey, GiB, LabelName, ObjectName

Weights = Literal["auto", "bf16", "fp8", "int8", "int4"]
KvCache = Literal["auto", "bf16", "fp8", "int8"]
ServedName = Annotated[
    str, Field(pattern="^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$", max_length=128)
]
SourceText = Annotated[str, Field(max_length=2048)]


class TokenSecret(ApiModel):
    """A Secret that holds the token for downloading a model."""

    name: ObjectName
    """Name of the Secret, in the object's namespace."""
    key: DataKey = "token"
    """Key in the Secret's data."""


class CertificateAuthority(ApiModel):
    """A ConfigMap with the certificates that a private server is trusted by."""

    name: ObjectName
    """Name of the ConfigMap, in the object's namespace."""
    key: DataKey = "ca.crt"
    """Key in the ConfigMap's data; its value holds certificates in PEM form."""


class ModelCache(ApiModel):
    """The volume on which a downloaded model is kept. It outlives the object."""

    existing_claim: ObjectName | None = None
    """A PersistentVolumeClaim to use; absent, the operator makes one for each source."""
    storage_class_name: ObjectName | None = None
    """Storage class of the claim that is made; absent, the cluster's default class."""
    size_gib: Annotated[GiB | None, Field(alias="sizeGiB")] = None
    """Size of the claim that is made; absent, 100. It may grow, where the class allows that."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] | None = None
    """Access mode of the claim that is made; absent, `ReadWriteOnce`, which keeps all replicas
    on one node."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.existingClaim) || !(has(self.storageClassName) || has(self.sizeGiB)"
            " || has(self.accessMode))",
            holds=lambda cache: (
                cache.existing_claim is None
                or (cache.storage_class_name, cache.size_gib, cache.access_mode)
                == (None, None, None)
            ),
            message="storageClassName, sizeGiB and accessMode describe a claim that is made; they"
            " may not be given beside existingClaim",
            field_path=".existingClaim",
        ),
    )

    @property
    def claim_size_gib(self) -> int:
        """Size of the claim that is made."""
        return self.size_gib if self.size_gib is not None else 100

    @property
    def claim_access_mode(self) -> str:
        """Access mode of the claim that is made."""
        return self.access_mode or "ReadWriteOnce"


class Adapter(ApiModel):
    """A LoRA adapter, served under a name of its own."""

    name: LabelName
    """The name that requests ask for."""
    source: SourceText
    """Where the adapter comes from, in the forms of `spec.model.source` that are not downloaded: a
    folder with PEFT's adapter_config.json and adapter_model.safetensors, or that file."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.source.matches(r'{model_source.PATTERN}')",
            holds=lambda adapter: model_source.is_source(adapter.source),
            message=f"source is '{{source}}'; allowed are {model_source.ALLOWED}",
            field_path=".source",
        ),
        Rule(
            cel="!self.source.startsWith('hf://') && !self.source.startsWith('https://')",
            holds=lambda adapter: not adapter.source.startswith(("hf://", "https://")),
            message="adapters are not downloaded in this version, and source is '{source}': put"
            " the adapter on a claim (pvc://), into an image (oci://, package://) or on the nodes"
            " (nodePath://)",
            field_path=".source",
            reason="FieldValueForbidden",
        ),
    )

    @property
    def parsed_source(self) -> model_source.Mounted:
        """The source, taken apart."""
        source = model_source.parse_source(self.source)
        assert not isinstance(source, model_source.Downloaded)  # noqa: S101 - a rule refuses them
        return source


def _only_downloads(field: str) -> Callable[[Any], bool]:
    return lambda model: (
        getattr(model, field) is None or model.source.startswith(("hf://", "https://"))
    )


class FallbackModel(ApiModel):
    """Which model is served, and how precisely."""

    source: SourceText = "package://smollm2"
    """Where the model comes from: `package://NAME` (in the worker's image), `oci://IMAGE`,
    `pvc://CLAIM/FOLDER`, `hf://ORGANISATION/NAME@REVISION`, `https://HOST/FILE#sha256=HEX` or
    `nodePath:///FOLDER`."""
    credentials_secret: TokenSecret | None = None
    """The token for downloading from `hf://` or `https://`."""
    certificate_authority: CertificateAuthority | None = None
    """Certificates to trust when downloading, for a private server or mirror."""
    cache: ModelCache | None = None
    """Where a downloaded model is kept."""
    weights: Weights = "auto"
    """Precision of the weights in memory; `auto` takes what the files hold. Unquantized files are
    rounded to `fp8`, `int8` or `int4` (groups of 128) while they are loaded."""
    kv_cache: KvCache = "auto"
    """Precision of the KV cache; `auto` takes 8 bits on a GPU, and the precision of the computation
    in layers whose keys have outliers and on a CPU."""
    max_context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Longest context that is served; absent, the model's own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.source.matches(r'{model_source.PATTERN}')",
            holds=lambda model: model_source.is_source(model.source),
            message=f"source is '{{source}}'; allowed are {model_source.ALLOWED}",
            field_path=".source",
        ),
        *(
            Rule(
                cel=f"!has(self.{alias}) || self.source.startsWith('hf://')"
                " || self.source.startsWith('https://')",
                holds=_only_downloads(field),
                message=f"{alias} is for downloading, from hf:// or https://;"
                " source is '{source}'",
                field_path=f".{alias}",
            )
            for field, alias in (
                ("credentials_secret", "credentialsSecret"),
                ("certificate_authority", "certificateAuthority"),
                ("cache", "cache"),
            )
        ),
    )
    update_rules: ClassVar[tuple[UpdateRule, ...]] = (
        UpdateRule(
            cel="self.source != oldSelf.source || !has(self.cache) || !has(oldSelf.cache)"
            " || has(self.cache.existingClaim) || has(oldSelf.cache.existingClaim)"
            " || ((has(self.cache.storageClassName) ? self.cache.storageClassName : '')"
            " == (has(oldSelf.cache.storageClassName) ? oldSelf.cache.storageClassName : '')"
            " && (has(self.cache.accessMode) ? self.cache.accessMode : 'ReadWriteOnce')"
            " == (has(oldSelf.cache.accessMode) ? oldSelf.cache.accessMode : 'ReadWriteOnce')"
            " && (has(self.cache.sizeGiB) ? self.cache.sizeGiB : 100)"
            " >= (has(oldSelf.cache.sizeGiB) ? oldSelf.cache.sizeGiB : 100))",
            holds=lambda new, old: (
                new.source != old.source
                or new.cache is None
                or old.cache is None
                or new.cache.existing_claim is not None
                or old.cache.existing_claim is not None
                or (
                    new.cache.storage_class_name == old.cache.storage_class_name
                    and new.cache.claim_access_mode == old.cache.claim_access_mode
                    and new.cache.claim_size_gib >= old.cache.claim_size_gib
                )
            ),
            message="the claim of this source exists: its storageClassName and accessMode cannot"
            " change and its sizeGiB cannot shrink; name another claim as existingClaim",
            field_path=".cache",
        ),
    )

    @property
    def parsed_source(self) -> model_source.Source:
        """The source, taken apart."""
        return model_source.parse_source(self.source)


class ModelSpec(FallbackModel):
    """Which model is served, under which name, and how precisely."""

    served_name: ServedName | None = None
    """The name that requests ask for; absent, the object's name."""
    lora: Annotated[list[Adapter], keyed("name", max_items=32)] | None = None
    """LoRA adapters of the model, each served under its own name beside it. Fallbacks have none."""

    rules: ClassVar[tuple[Rule, ...]] = (*FallbackModel.rules, no_doubles("lora", "name"))
