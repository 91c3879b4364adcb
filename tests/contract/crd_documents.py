"""Documents made from a CRD: one place at a time on and beside each limit, and at random."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from deepseek_contract.deployment import NOT_YET

Document = dict[str, Any]
Schema = dict[str, Any]

SHA256 = "0123456789abcdef" * 4
SOURCES = (
    "package://smollm2",
    "hf://deepseek-ai/R1@main",
    f"https://models.example/f.gguf#sha256={SHA256}",
    "oci://registry.example/r1:v1#path=models/r1",
    "pvc://models/r1",
    "nodePath:///models",
)
FLAGS = ("--seed=1", "--dtype=float32", "--prefix-cache")
LABELS = ("zone", "node.example/gpu", f"{'p' * 253}/gpu")
NO_LABELS = ("not a label", "-", f"{'p' * 254}/gpu")
# What only a rule checks: values that are right, and values that are wrong.
POOLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "source": (SOURCES, ("hf://r1", "pvc://models/../r1", "s3://bucket/r1", "package://a b")),
    "extraArgs[]": (FLAGS, ("--model=/m", "--unknown")),
    "nodeSelector": (LABELS, NO_LABELS),
    "matchLabels": (LABELS, NO_LABELS),
    "annotations": (LABELS, NO_LABELS),
    "limits": (
        ("cpu", "memory", "rdma/hca", f"{'p' * 244}/hca"),
        (
            "memroy",
            "nvidia.com/gpu",
            "requests.amd.com/gpu",
            "a.kubernetes.io/b",
            f"{'p' * 245}/hca",
        ),
    ),
    "requests": (("cpu", "memory", "ephemeral-storage"), ("memroy", "rdma/hca", "nvidia.com/gpu")),
}
QUANTITIES = ("1", "500m", "1.5Gi", "2Gi", "0.001k", "999999999M")
NO_QUANTITIES = ("banana", "", "10 GiB", "1e3", "-1Gi", ".5", "1Ki1", "0", "1.5.1", "9999999999Ti")
JUNK: tuple[Any, ...] = (None, True, -1, 0, 1, 1.5, 10**30, "", "x y", "banana", [], {}, [None])
# What must stand beside a field for the field itself to decide.
BESIDE: dict[str, Document] = {
    "credentialsSecret": {"source": "hf://a/b"},
    "certificateAuthority": {"source": "hf://a/b"},
    "cache": {"source": "hf://a/b"},
    "migProfile": {"mode": "mig"},
    "memoryGiB": {"mode": "vgpu"},
    "count": {"mode": "dra"},
    "fallbacks[]": {"gpu": {"mode": "cpu"}},
    "degrade": {"fallbacks": []},
    "promote": {"fallbacks": []},
    "tolerationSeconds": {"key": "a", "effect": "NoExecute"},
    "minReplicas": {"maxReplicas": 1000},
    "minPercent": {"maxPercent": 100},
    "minDomains": {"whenUnsatisfiable": "DoNotSchedule"},
    "tolerations[]": {"operator": "Exists"},
    "value": {"key": "a"},
    "matchExpressions[]": {"operator": "Exists"},
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
}
# Fields that are refused in this version, which would drown everything else.
RARE = frozenset(row.path.rpartition(".")[2] for row in NOT_YET if not row.values)


def least(schema: Schema, name: str) -> Any:
    """The smallest value that the schema and its rules allow."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("x-kubernetes-int-or-string"):
        return 1
    match schema["type"]:
        case "object":
            required = schema.get("required", [])
            parts = {key: least(schema["properties"][key], key) for key in required}
            return parts | copy.deepcopy(BESIDE.get(name, {})) if name.endswith("[]") else parts
        case "array":
            return [least(schema["items"], f"{name}[]")] * schema.get("minItems", 0)
        case "integer":
            return schema["minimum"]
        case "boolean":
            return False
    return POOLS[name][0][0] if name in POOLS else "a" if "pattern" in schema else ""


def variations(schema: Schema, name: str, seen: set[str] | None = None) -> Iterator[Any]:
    """Values on and beside each limit of this place, then of each place below it.

    A part that the schema has in several places, word for word, is varied inside in the first.
    """
    seen = set() if seen is None else seen
    yield from JUNK
    if schema.get("properties"):
        words = json.dumps(schema | {"description": ""})
        if words in seen:
            return
        seen.add(words)
    if "enum" in schema:
        yield from schema["enum"]
        yield from (value.lower() + "x" for value in schema["enum"])
        return
    if schema.get("x-kubernetes-int-or-string"):
        yield from (*QUANTITIES, *NO_QUANTITIES, 10**15 - 1, 10**15)
        return
    match schema["type"]:
        case "object" if "properties" in schema:
            yield from _object_variations(schema, name, seen)
        case "object":
            yield from _map_variations(schema, name, seen)
        case "array":
            item = least(schema["items"], f"{name}[]")
            yield [item] * (schema["maxItems"] + 1)
            yield [item, item]
            for varied in variations(schema["items"], f"{name}[]", seen):
                yield [varied]
        case "integer":
            limits = schema["minimum"], schema["maximum"]
            yield from (*limits, limits[0] - 1, limits[1] + 1, str(limits[0]))
        case "string":
            right, wrong = POOLS.get(name, ((), ()))
            yield from (*right, *wrong, "a", "A", "a-b", "a.b", "a/b", "-", "a-", "a:b", "1g.18gb")
            yield from ("a" * schema["maxLength"], "a" * (schema["maxLength"] + 1), "a\n", "é")
            yield from (".", "..", ".a", "..a")
            # Of qualified names the part before the slash has a limit of its own.
            yield from (f"{'p' * 253}/a", f"{'p' * 254}/a")


def _object_variations(schema: Schema, name: str, seen: set[str]) -> Iterator[Any]:
    base = least(schema, name)
    yield base
    yield base | {"unknownField": 1}
    for missing in schema.get("required", []):
        yield {key: value for key, value in base.items() if key != missing}
    for key, part in schema["properties"].items():
        for varied in variations(part, key, seen):
            yield base | copy.deepcopy(BESIDE.get(key, {})) | {key: varied}


def _map_variations(schema: Schema, name: str, seen: set[str]) -> Iterator[Any]:
    right, wrong = POOLS.get(name, (("a", "b"), ()))
    value = least(schema["additionalProperties"], f"{name}.*")
    for key in (*right, *wrong):
        yield {key: value}
    yield {f"a{number}": value for number in range(schema["maxProperties"] + 1)}
    for key in right:
        for varied in variations(schema["additionalProperties"], f"{name}.*", seen):
            yield {key: varied}


def drawn(draw: st.DrawFn, schema: Schema, name: str, rare: frozenset[str]) -> Any:
    """A value that the schema allows; optional parts are there one time in five, or in 40."""
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    if schema.get("x-kubernetes-int-or-string"):
        return draw(st.one_of(st.integers(1, 10), st.sampled_from(QUANTITIES)))
    kind = schema["type"]
    pool = POOLS[name][0] if name in POOLS else None
    if kind == "object" and "properties" in schema:
        required = schema.get("required", [])
        return {
            key: drawn(draw, part, key, rare)
            for key, part in schema["properties"].items()
            if key in required or draw(st.integers(0, 39 if key in rare else 4)) == 0
        }
    if kind == "object":
        keys = draw(st.lists(st.sampled_from(pool or ("a", "b")), max_size=3, unique=True))
        return {key: drawn(draw, schema["additionalProperties"], f"{name}.*", rare) for key in keys}
    if kind == "array":
        size = draw(st.integers(schema.get("minItems", 0), min(schema["maxItems"], 3)))
        return [drawn(draw, schema["items"], f"{name}[]", rare) for _ in range(size)]
    if kind == "integer":
        smallest, largest = schema["minimum"], schema["maximum"]
        return draw(st.integers(smallest, min(largest, smallest + 20)))
    if kind == "boolean":
        return draw(st.booleans())
    if pool:
        return draw(st.sampled_from(pool))
    if "pattern" in schema:
        ascii_text = st.from_regex(
            schema["pattern"], fullmatch=True, alphabet=st.characters(codec="ascii")
        )
        return draw(ascii_text.filter(lambda value: len(value) <= schema["maxLength"]))
    return draw(st.text(st.characters(codec="ascii"), max_size=8))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each container with each of its keys or indices, the whole document down."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [p for v in value.values() for p in places(v)]
    if isinstance(value, list):
        return [(value, i) for i in range(len(value))] + [p for v in value for p in places(v)]
    return []


@st.composite
def specs(draw: st.DrawFn, schema: Schema, rare: frozenset[str]) -> Document:
    """A spec, broken in none, one or two places."""
    holder = {"spec": drawn(draw, schema, "spec", rare)}
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        container, key = draw(st.sampled_from(places(holder)))
        match draw(st.integers(0, 3)):
            case 0 if container is not holder:
                del container[key]
            case 1 if isinstance(container[key], dict):
                container[key]["unknownField"] = 1
            case 2 if isinstance(container[key], int):
                container[key] += draw(st.sampled_from((-1, 1)))
            case _:
                # A copy: the next place that is broken may be within it.
                container[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    return holder
