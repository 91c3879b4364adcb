"""A LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

Everything is compared before a weight is read: each tensor that the configuration asks for is
there in its shape, and nothing else is in the file. A field that would change what the adapter
computes, and is not served or not known, is refused by name: an adapter that is applied in part
answers rubbish.

Source: PEFT, `LoraConfig` and `BaseTuner.check_target_module_exists`.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepseek_kernels.lora import MAX_RANK
from deepseek_worker.errors import BrokenCheckpoint, ModelNotFound, UnsupportedModel
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.models.decoder import BlockProjections

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# They say how the adapter was made, or belong to what is refused or not there.
IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "loftq_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "task_type",
    }
)
READ = frozenset(
    {
        "alpha_pattern",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
# Those that start from other base weights than the model's own are not among them.
STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class TargetShape:
    """A matrix that adapters may change."""

    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class Target:
    """What an adapter adds to one matrix: `scale * B @ A`."""

    rank: int
    scale: float
    a: str
    """Name of the tensor `[rank, in_features]`."""
    b: str
    """Name of the tensor `[out_features, rank]`."""


class PeftAdapter:
    """One adapter, compared with its model; its weights are read by `weights`."""

    def __init__(self, name: str, path: Path, model: ModelConfig) -> None:
        """Open an adapter.

        Args:
            name: What requests call it.
            path: The folder with both files, or the safetensors file beside its configuration.
            model: What it is to be added to.

        Raises:
            ModelNotFound: a file is missing.
            UnsupportedModel: the adapter is sound, but asks for what is not served.
            BrokenCheckpoint: the files contradict each other or the model, or are cut short.
        """
        self.name = name
        folder, weights = _find(name, path)
        config = _AdapterConfig(name, folder / CONFIG)
        self._file, shapes, self._path = _open(name, weights)
        matrices = matrices_of(model)
        self.targets = {
            module: Target(
                config.rank(module),
                config.scale(module),
                f"{PREFIX}{module}.lora_A.weight",
                f"{PREFIX}{module}.lora_B.weight",
            )
            for module in config.choose(tuple(matrices))
        }
        self._compare(shapes, matrices)

    def weights(self, module: str) -> tuple[Tensor, Tensor]:
        """`A` as `[rank, in_features]` and `scale * B` as `[out_features, rank]`, float32 both.

        Raises:
            BrokenCheckpoint: a tensor holds no floating-point numbers, or others than finite ones.
        """
        target = self.targets[module]
        return self._read(target.a), self._read(target.b) * target.scale

    def _compare(
        self, shapes: Mapping[str, tuple[int, ...]], matrices: Mapping[str, TargetShape]
    ) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for module, target in self.targets.items():
            expected[target.a] = (target.rank, matrices[module].in_features)
            expected[target.b] = (matrices[module].out_features, target.rank)
        missing = [name for name in expected if name not in shapes]
        if missing:
            raise BrokenCheckpoint(
                f"adapter '{self.name}': {self._path} lacks the tensor {missing[0]}"
                f"{_and_more(missing)}, which {CONFIG} asks for; save or download it again"
            )
        unused = [name for name in shapes if name not in expected]
        if unused:
            raise UnsupportedModel(
                f"adapter '{self.name}': {self._path} has the tensor {unused[0]}"
                f"{_and_more(unused)}, which is none that {CONFIG} asks for; served are lora_A and"
                f" lora_B of {', '.join(TARGETS)}"
            )
        for name, shape in expected.items():
            if shapes[name] != shape:
                raise BrokenCheckpoint(
                    f"adapter '{self.name}': the tensor {name} has shape {list(shapes[name])};"
                    f" the model and the adapter's rank ask for {list(shape)}; was it made for"
                    " another model?"
                )

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise BrokenCheckpoint(
                f"adapter '{self.name}': the tensor {name} is stored as {kind}; allowed are"
                " float32, bfloat16, float16 and float64"
            )
        tensor = tensor.to(torch.float32)
        if not tensor.isfinite().all():
            raise BrokenCheckpoint(
                f"adapter '{self.name}': the tensor {name} holds values that are not finite"
            )
        return tensor


def matrices_of(model: ModelConfig) -> dict[str, TargetShape]:
    """Every matrix that adapters may change, by its checkpoint name."""
    matrices = {}
    for index in range(model.num_layers):
        block = BlockProjections.of(model, index)
        for projection in (block.qkv, block.output, block.gate_up, block.down):
            for module, rows in projection.parts.items():
                matrices[module] = TargetShape(rows, projection.in_features)
    return matrices


class _AdapterConfig:
    """What adapter_config.json says."""

    def __init__(self, adapter: str, path: Path) -> None:
        self._adapter = adapter
        self._values = _read_json(adapter, path)
        self._refuse_unserved()
        self._r = self._number("r", self._values.get("r"), whole=True)
        self._alpha = self._number("lora_alpha", self._values.get("lora_alpha"))
        self._use_rslora = self._values.get("use_rslora", False)
        if not isinstance(self._use_rslora, bool):
            raise self._broken("use_rslora", self._use_rslora, "true or false")
        self._ranks = self._patterns("rank_pattern", partial(self._number, whole=True))
        self._alphas = self._patterns("alpha_pattern", self._number)

    def rank(self, module: str) -> int:
        """Of the adapter of one matrix.

        Raises:
            UnsupportedModel: it is too large.
        """
        rank = int(_by_pattern(self._ranks, module, self._r))
        if rank > MAX_RANK:
            raise UnsupportedModel(
                f"adapter '{self._adapter}': the rank of {module} is {rank}; at most {MAX_RANK} is"
                " served: merge the adapter into its model, or train a smaller one"
            )
        return rank

    def scale(self, module: str) -> float:
        """What the product of one matrix' adapter is multiplied by."""
        rank, alpha = self.rank(module), _by_pattern(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._use_rslora else rank)

    def choose(self, modules: Sequence[str]) -> list[str]:
        """Which of the model's matrices the adapter changes.

        Raises:
            UnsupportedModel: it changes others too, or none of them.
        """
        wanted, excluded = self._values.get("target_modules"), self._values.get("exclude_modules")
        if isinstance(wanted, list):
            for name in wanted:
                if not isinstance(name, str) or not any(_is_named(m, (name,)) for m in modules):
                    raise self._unserved(
                        "target_modules", name, f"of the model's modules {', '.join(TARGETS)}"
                    )
        elif not isinstance(wanted, str):
            raise self._broken("target_modules", wanted, "a list of names or a regular expression")
        chosen = [
            module
            for module in modules
            if self._matches("target_modules", wanted, module)
            and not (excluded and self._matches("exclude_modules", excluded, module))
            and self._is_in_layers(module)
        ]
        if not chosen:
            raise UnsupportedModel(
                f"adapter '{self._adapter}': target_modules, exclude_modules and"
                f" layers_to_transform in {CONFIG} leave none of the model's modules"
                f" {', '.join(TARGETS)}"
            )
        return chosen

    def _refuse_unserved(self) -> None:
        values = self._values
        if values.get("peft_type") != "LORA":
            raise self._unserved("peft_type", values.get("peft_type"), "as 'LORA'")
        if values.get("init_lora_weights") not in STARTS:
            raise self._unserved(
                "init_lora_weights",
                values["init_lora_weights"],
                "unless it is converted when it is saved, because it changes the base weights",
            )
        if values.get("bias") not in (None, "none"):
            raise self._unserved("bias", values["bias"], "as 'none'")
        for field, value in values.items():
            # What is off, null or empty changes nothing, whatever it is.
            if value and field not in IGNORED | READ | {"bias"}:
                raise self._unserved(field, value, "unset")

    def _number(self, field: str, value: Any, *, whole: bool = False) -> float:
        is_number = isinstance(value, int) or (isinstance(value, float) and not whole)
        if not is_number or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._broken(field, value, f"a{' whole' if whole else ''} number above 0")
        return float(value)

    def _patterns(self, field: str, check: Any) -> dict[re.Pattern[str], float]:
        values = self._values.get(field) or {}
        if not isinstance(values, dict):
            raise self._broken(field, values, "an object with a number for each pattern")
        return {
            self._compiled(field, rf"(?:.*\.)?(?:{key})"): check(f"{field}.{key}", value)
            for key, value in values.items()
        }

    def _matches(self, field: str, wanted: Any, module: str) -> bool:
        if isinstance(wanted, list):
            return _is_named(module, wanted)
        if not isinstance(wanted, str):
            raise self._broken(field, wanted, "a list of names or a regular expression")
        if field == "target_modules" and wanted.lower() == "all-linear":
            return True
        return self._compiled(field, wanted).fullmatch(module) is not None

    def _compiled(self, field: str, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise self._broken(field, pattern, f"a regular expression ({error})") from error

    def _is_in_layers(self, module: str) -> bool:
        layers, pattern = (
            self._values.get("layers_to_transform"),
            self._values.get("layers_pattern"),
        )
        if layers is None or layers == []:
            return True
        if pattern not in (None, [], "layers", ["layers"]):
            raise self._unserved("layers_pattern", pattern, "as 'layers'")
        wanted = layers if isinstance(layers, list) else [layers]
        if any(not isinstance(layer, int) or isinstance(layer, bool) for layer in wanted):
            raise self._broken("layers_to_transform", layers, "a layer's number, or a list of them")
        return int(module.split(".")[2]) in wanted

    def _unserved(self, field: str, value: Any, served: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"adapter '{self._adapter}': {field} in {CONFIG} is {_shown(value)}; it is served only"
            f" {served}"
        )

    def _broken(self, field: str, value: Any, wanted: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(
            f"adapter '{self._adapter}': {field} in {CONFIG} is {_shown(value)}; it has to be"
            f" {wanted}"
        )


def _find(adapter: str, path: Path) -> tuple[Path, Path]:
    """The folder and the file with the weights."""
    folder, weights = (path, path / WEIGHTS) if path.is_dir() else (path.parent, path)
    if not path.exists():
        raise ModelNotFound(f"adapter '{adapter}': {path} does not exist")
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"adapter '{adapter}': {folder} holds no {CONFIG}")
    if weights.suffix != ".safetensors":
        raise UnsupportedModel(
            f"adapter '{adapter}': {path} is no .safetensors file, and no folder with one; save the"
            " adapter with PEFT again"
        )
    if not weights.is_file():
        raise ModelNotFound(f"adapter '{adapter}': {folder} holds no {WEIGHTS}")
    return folder, weights


def _open(adapter: str, path: Path) -> tuple[Any, dict[str, tuple[int, ...]], Path]:
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BrokenCheckpoint(
            f"adapter '{adapter}': {path} is cut short or no safetensors file: {error}; save or"
            " download it again"
        ) from error
    return file, shapes, path


def _read_json(adapter: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(
            f"adapter '{adapter}': {path} is not readable JSON: {error}"
        ) from error
    if not isinstance(content, dict):
        raise BrokenCheckpoint(f"adapter '{adapter}': {path} holds no JSON object")
    return content


def _is_named(module: str, names: Collection[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    found = (value for pattern, value in patterns.items() if pattern.fullmatch(module))
    return next(found, default)


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"
