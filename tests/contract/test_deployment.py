"""What a DeepSeekDeployment may say, case by case, in pydantic and at the real API server."""

from typing import Any

import pytest
from pydantic import ValidationError

from deepseek_contract.deployment import NOT_YET, DeepSeekDeployment

PATH = "/apis/deepseek.dev/v1alpha1/namespaces/default/deepseekdeployments"
SHA256 = "0123456789abcdef" * 4


def document(spec: dict[str, Any], name: str = "example") -> dict[str, Any]:
    return {
        "apiVersion": "deepseek.dev/v1alpha1",
        "kind": "DeepSeekDeployment",
        "metadata": {"name": name},
        "spec": spec,
    }


def source(text: str, **more: Any) -> dict[str, Any]:
    return {"model": {"source": text, **more}}


def pod(**settings: Any) -> dict[str, Any]:
    return {"pod": settings}


def memory(quantity: Any) -> dict[str, Any]:
    return pod(resources={"limits": {"memory": quantity}})


def toleration(**fields: Any) -> dict[str, Any]:
    return pod(tolerations=[fields])


def route(*gateways: dict[str, str]) -> dict[str, Any]:
    return {"routing": {"httpRoute": {"gateways": list(gateways)}}}


def node_term(**fields: Any) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "zone", **fields}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return pod(affinity={"nodeAffinity": required})


ACCEPTED = {
    "nothing at all": {},
    "a model in the worker's image": source("package://smollm2"),
    "an image volume": source("oci://registry.example:5000/models/r1-7b:v1"),
    "an image volume by digest": source(f"oci://registry.example/r1@sha256:{SHA256}"),
    "a folder of an image": source("oci://registry.example/r1:v1#path=models/r1"),
    "a claim": source("pvc://models"),
    "a folder of a claim": source("pvc://models/r1/7b"),
    "a file with a dot on a claim": source("pvc://models/r1-7b.Q4_1.gguf"),
    "a hub repository": source("hf://deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    "a revision of a hub repository": source("hf://deepseek-ai/R1@refs/pr/1"),
    "a download": source(f"https://models.example/a/model.gguf#sha256={SHA256}"),
    "a download with a port and a query": source(
        f"https://m.example:8443/f?a=b&c=%20#sha256={SHA256}"
    ),
    "autoscaling": {"autoscaling": {"maxReplicas": 3}},
    "autoscaling by a name that an HPA would not take": {
        "autoscaling": {"maxReplicas": 3, "metric": "nvidia.com/gpu_memory_used_percent"}
    },
    "autoscaling with all that it has": {
        "replicas": 7,
        "autoscaling": {
            "minReplicas": 2,
            "maxReplicas": 9,
            "gpuMemoryPercent": 70,
            "metric": "used",
            "queuedRequestsPerReplica": 1,
            "provider": "keda",
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max"},
                "scaleDown": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]},
            },
        },
    },
    "a folder of the node": source("nodePath:///data/models/r1"),
    "a token for the hub": source("hf://a/b", credentialsSecret={"name": "hub"}),
    "certificates for the hub": source("hf://a/b", certificateAuthority={"name": "ca"}),
    "a cache that exists": source("hf://a/b", cache={"existingClaim": "models"}),
    "a cache to make": source("hf://a/b", cache={"storageClassName": "fast", "sizeGiB": 50}),
    "a name with a slash": source("package://smollm2", servedName="deepseek-ai/R1:7b"),
    "16 bit": source("package://smollm2", weights="bf16", kvCache="bf16"),
    "an integral float": {"gpu": {"memoryLimitPercent": 80.0}},
    "null for absent": {"replicas": None, "model": {"servedName": None}, "memory": None},
    "no pods": {"replicas": 0},
    "a CPU": {"gpu": {"mode": "cpu"}},
    "a MIG slice": {"gpu": {"mode": "mig", "migProfile": "1g.18gb"}},
    "a MIG slice with media engines": {"gpu": {"mode": "mig", "migProfile": "1g.10gb+me"}},
    "a share of a GPU": {"gpu": {"mode": "vgpu", "memoryGiB": 20}},
    "a priority": {"priority": -5},
    "every percent": {"gpu": {"memoryLimitPercent": 100}},
    "a load balancer": {
        "routing": {"service": {"type": "LoadBalancer", "annotations": {"a.example/b": "c"}}}
    },
    "API keys": {"security": {"apiKeySecret": {"name": "keys"}}},
    "one replica after the other": {"rollout": "replace"},
    "adapters": source(
        "package://smollm2",
        lora=[
            {"name": "terse", "source": "pvc://adapters/terse"},
            {"name": "sql-2", "source": "oci://registry.example/sql:1#path=adapter"},
            {"name": "local", "source": "nodePath:///srv/adapter_model.safetensors"},
        ],
    ),
    "two listeners of a Gateway and another one": route(
        {"name": "a", "sectionName": "http"}, {"name": "a", "sectionName": "https"}, {"name": "b"}
    ),
    "Gateways of one name in two namespaces": route(
        {"name": "a"}, {"name": "a", "namespace": "gateways"}
    ),
    "a whole number of bytes": memory(5),
    "binary gigabytes": memory("1.5Gi"),
    "millicores": pod(resources={"requests": {"cpu": "250m"}, "limits": {"cpu": "0.5"}}),
    "a request without limit": pod(resources={"requests": {"cpu": 2}}),
    "another device": pod(resources={"limits": {"rdma/hca": 1, "a.example/b": "2"}}),
    "an environment variable": pod(env=[{"name": "TZ", "value": "UTC"}, {"name": "EMPTY"}]),
    "a variable from a Secret": pod(
        env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    ),
    "a flag": pod(extraArgs=["--max-running-requests=4", "--no-prefix-cache"]),
    "a toleration of everything": toleration(operator="Exists"),
    "a toleration for a while": toleration(
        key="a", operator="Exists", effect="NoExecute", tolerationSeconds=30
    ),
    "nodes by label": pod(nodeSelector={"node.example/gpu": "h200", "zone": ""}),
    "nodes by comparison": node_term(operator="Gt", values=["3"]),
    "a spread": pod(topologySpread=[{"topologyKey": "topology.kubernetes.io/zone"}]),
    "two spreads": pod(
        topologySpread=[
            {"topologyKey": "zone"},
            {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2},
        ]
    ),
}

# Each with a part of the message that both give, where both give one of ours.
REFUSED = {
    "a scheme that is not known": (source("s3://bucket/model"), "allowed are package://NAME"),
    "no scheme": (source("smollm2"), "source is 'smollm2'"),
    "an empty source": (source(""), "allowed are"),
    "a path that climbs": (source("pvc://models/../secrets"), "allowed are"),
    "a node path that climbs": (source("nodePath:///models/../etc"), "allowed are"),
    "the root of a node": (source("nodePath:///"), "allowed are"),
    "http": (source(f"http://m.example/f#sha256={SHA256}"), "allowed are"),
    "a download without checksum": (source("https://models.example/model.gguf"), "#sha256=HEX"),
    "half a checksum": (source("https://m.example/f#sha256=0123"), "#sha256=HEX"),
    "a password in a URL": (source(f"https://me:secret@m.example/f#sha256={SHA256}"), "allowed"),
    "a hub name without organisation": (source("hf://r1"), "hf://ORGANISATION/NAME"),
    "a line end in a source": (source("package://smollm2\n"), "allowed are"),
    "a token for a claim": (
        source("pvc://models", credentialsSecret={"name": "hub"}),
        "credentialsSecret is for downloading",
    ),
    "a cache for an image": (source("oci://a/b", cache={}), "cache is for downloading"),
    "a claim that exists and is made": (
        source("hf://a/b", cache={"existingClaim": "a", "sizeGiB": 5}),
        "may not be given beside existingClaim",
    ),
    "a name with a blank": (source("package://smollm2", servedName="my model"), None),
    "weights of 3 bit": (source("package://smollm2", weights="int3"), None),
    "keys of 4 bit": (source("package://smollm2", kvCache="int4"), None),
    "an adapter that would be downloaded": (
        source("package://smollm2", lora=[{"name": "a", "source": "hf://a/b"}]),
        "adapters are not downloaded in this version, and source is 'hf://a/b'",
    ),
    "an adapter from nowhere": (
        source("package://smollm2", lora=[{"name": "a", "source": "/adapters/a"}]),
        "allowed are",
    ),
    "an adapter under the object's name": (
        source("package://smollm2", lora=[{"name": "example", "source": "pvc://a"}]),
        "an adapter may not have the name that the model itself is served under",
    ),
    "an adapter under the served name": (
        source("package://smollm2", servedName="big", lora=[{"name": "big", "source": "pvc://a"}]),
        "an adapter may not have the name that the model itself is served under",
    ),
    "a claim of a device": (
        {"gpu": {"mode": "dra"}},
        "spec.gpu.mode dra is not available in this version: use whole, mig, vgpu or cpu",
    ),
    "two MIG slices": (
        {"gpu": {"mode": "mig", "migProfile": "1g.18gb", "count": 2}},
        "with the mode mig the count must be 1",
    ),
    "two shares of a GPU": (
        {"gpu": {"mode": "vgpu", "memoryGiB": 20, "count": 2}},
        "with the mode vgpu the count must be 1",
    ),
    "a MIG profile for a whole GPU": (
        {"gpu": {"migProfile": "1g.18gb"}},
        "belongs to the mode mig",
    ),
    "a share of a GPU of no size": ({"gpu": {"mode": "vgpu"}}, "that mode needs it; mode is vgpu"),
    "a misspelt share": ({"gpu": {"mode": "vgpu", "gpumemory": 20}}, None),
    "a MIG slice without profile": ({"gpu": {"mode": "mig"}}, "that mode needs it; mode is mig"),
    "a MIG profile that no card has": (
        {"gpu": {"mode": "mig", "migProfile": "9g.99gb"}},
        None,
    ),
    "GPU memory for a whole GPU": (
        {"gpu": {"memoryGiB": 20}},
        "memoryGiB belongs to the mode vgpu",
    ),
    "a mode that is not known": ({"gpu": {"mode": "gpu"}}, None),
    "two GPUs": ({"gpu": {"count": 2}}, "spec.gpu.count above 1 is not available in this version"),
    "two CPUs as GPUs": ({"gpu": {"mode": "cpu", "count": 2}}, "the count must be 1"),
    "no GPU": ({"gpu": {"count": 0}}, None),
    "no percent": ({"gpu": {"memoryLimitPercent": 0}}, None),
    "a percent below zero": ({"gpu": {"memoryLimitPercent": -5}}, None),
    "more than every percent": ({"gpu": {"memoryLimitPercent": 101}}, None),
    "half a percent": ({"gpu": {"memoryLimitPercent": 99.5}}, None),
    "a percent with its sign": ({"gpu": {"memoryLimitPercent": "80%"}}, None),
    "host memory": ({"memory": {"hostKvGiB": 10}}, "spec.memory is not available"),
    "fewest above most": (
        {"autoscaling": {"minReplicas": 4, "maxReplicas": 3}},
        "minReplicas may not be above maxReplicas",
    ),
    **{
        f"an autoscaling target of {target!r}": (
            {"autoscaling": {"maxReplicas": 3, "gpuMemoryPercent": target}},
            None,
        )
        for target in (0, -5, 101, 99.5, "80%")
    },
    "autoscaling to nothing": ({"autoscaling": {"maxReplicas": 0}}, None),
    "autoscaling from nothing": ({"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}, None),
    "autoscaling without a limit": ({"autoscaling": {"minReplicas": 2}}, None),
    "a metric of somebody else": (
        {"autoscaling": {"maxReplicas": 2, "metric": "DCGM_FI_DEV_FB_USED"}},
        None,
    ),
    "rules of scaling without a policy": (
        {"autoscaling": {"maxReplicas": 2, "behavior": {"scaleUp": {"policies": []}}}},
        None,
    ),
    "a Gateway twice": (route({"name": "a"}, {"name": "a"}), "names a Gateway twice"),
    "a Gateway and one of its listeners": (
        route({"name": "a"}, {"name": "a", "sectionName": "http"}),
        "names a Gateway twice",
    ),
    "a listener twice": (
        route({"name": "a", "sectionName": "http"}, {"name": "a", "sectionName": "http"}),
        "names a Gateway twice",
    ),
    "a key that climbs": ({"security": {"apiKeySecret": {"name": "keys", "key": ".."}}}, None),
    "a fallback that is the primary": (
        {"fallbacks": [{"name": "small", "model": {"source": "package://smollm2"}}]},
        "a fallback must differ from the primary",
    ),
    "the same fallback twice": (
        {
            "fallbacks": [
                {"name": "one", "model": {"source": "package://tiny"}},
                {"name": "two", "model": {"source": "package://tiny"}},
            ]
        },
        "two fallbacks are the same model on the same gpu",
    ),
    "a fallback on more GPUs": (
        {
            "fallbacks": [
                {"name": "big", "model": {"source": "package://tiny"}, "gpu": {"count": 2}}
            ]
        },
        "a fallback may not ask for more GPUs, or more of one, than the primary",
    ),
    "a fallback on more of a GPU": (
        {
            "gpu": {"mode": "vgpu", "memoryGiB": 8},
            "fallbacks": [
                {
                    "name": "big",
                    "model": {"source": "package://tiny"},
                    "gpu": {"mode": "vgpu", "memoryGiB": 9},
                }
            ],
        },
        "a fallback may not ask for more GPUs, or more of one, than the primary",
    ),
    "a fallback with a fallback": (
        {
            "fallbacks": [
                {"name": "one", "model": {"source": "package://tiny"}, "fallbacks": []},
            ]
        },
        "fallbacks",
    ),
    "a fallback that is named primary": (
        {"fallbacks": [{"name": "primary", "model": {"source": "package://tiny"}}]},
        "a fallback may not be named primary",
    ),
    "two fallbacks of one name": (
        {
            "fallbacks": [
                {"name": "a", "model": {"source": "package://tiny"}},
                {"name": "a", "model": {"source": "package://other"}},
            ]
        },
        None,
    ),
    "degrading without fallback": ({"degrade": {"afterSeconds": 5}}, "degrade needs fallbacks"),
    "promoting without fallback": ({"promote": {}}, "promote needs fallbacks"),
    "a rollout by fallback": ({"rollout": "viaFallback"}, "rollout viaFallback needs fallbacks"),
    "node switches": (
        {"recovery": {"nodeSwitchesPerHour": 61}},
        None,
    ),
    "an unknown field": ({"replica": 1}, None),
    "an unknown field below": ({"gpu": {"gpumem": 1}}, None),
    "Python's spelling of a field": ({"min_available": 1}, None),
    "replicas below zero": ({"replicas": -1}, None),
    "half a replica": ({"replicas": 1.5}, None),
    "replicas as text": ({"replicas": "3"}, None),
    "a truth for a number": ({"replicas": True}, None),
    "more replicas than any number": ({"replicas": 10**20}, None),
    "a list for a section": ({"model": []}, None),
    "text for a section": ({"model": "package://smollm2"}, None),
    "a port of zero": ({"routing": {"service": {"port": 0}}}, None),
    "a word as a quantity": (memory("banana"), "must be an amount above zero such as 500m"),
    "an empty quantity": (memory(""), "must be an amount above zero such as 500m"),
    "a blank in a quantity": (memory("10 GiB"), "must be an amount above zero such as 500m"),
    "an exponent": (memory("1e3"), "must be an amount above zero such as 500m"),
    "a negative quantity": (memory("-1Gi"), "must be an amount above zero such as 500m"),
    "a quantity without its zero": (memory(".5"), "must be an amount above zero such as 500m"),
    "digits after the unit": (memory("1Ki1"), "must be an amount above zero such as 500m"),
    "no memory": (memory("0"), "must be an amount above zero such as 500m"),
    "no memory as a number": (memory(0), "must be an amount above zero such as 500m"),
    "two points": (memory("1.5.1"), "must be an amount above zero such as 500m"),
    "more than Kubernetes can count": (
        memory("9999999999Ti"),
        "must be an amount above zero such as 500m",
    ),
    "half a byte as a number": (memory(0.5), None),
    "half a byte with the unit of cores": (memory("500m"), "write 500Mi or 500M instead"),
    "half a byte of disk": (
        pod(resources={"requests": {"ephemeral-storage": "500m"}}),
        "write 500Mi or 500M instead",
    ),
    "a device as a quota names it": (
        pod(resources={"limits": {"requests.amd.com/gpu": 1}}),
        "nor requests.… or kubernetes.io/…",
    ),
    "a request above its limit": (
        pod(resources={"requests": {"memory": "2Gi"}, "limits": {"memory": "1.5Gi"}}),
        "a request may not be above the limit",
    ),
    "a request above a limit in another unit": (
        pod(resources={"requests": {"cpu": 2}, "limits": {"cpu": "1999m"}}),
        "a request may not be above the limit",
    ),
    "a misspelt resource": (pod(resources={"limits": {"memroy": "1Gi"}}), "limits may name cpu"),
    "a resource of a GPU scheduler": (
        pod(resources={"requests": {"gpumemory": 1}}),
        "requests may name cpu",
    ),
    "a GPU among the resources": (
        pod(resources={"limits": {"nvidia.com/gpu": 1}}),
        "which spec.gpu asks for",
    ),
    "half a device": (pod(resources={"limits": {"rdma/hca": "500m"}}), "devices are whole"),
    "a device that is only requested": (
        pod(resources={"requests": {"rdma/hca": 1}}),
        "devices are in limits",
    ),
    "a MIG slice among the resources": (
        pod(resources={"limits": {"nvidia.com/mig-9g.99gb": 1}}),
        "which spec.gpu asks for",
    ),
    "a variable twice": (pod(env=[{"name": "A"}, {"name": "A", "value": "b"}]), None),
    "a variable with two values": (
        pod(
            env=[
                {
                    "name": "A",
                    "value": "b",
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                }
            ]
        ),
        "only one of value and valueFrom may be given for A",
    ),
    "a variable from nowhere": (pod(env=[{"name": "A", "valueFrom": {}}]), "exactly one of"),
    "a variable with a dash": (pod(env=[{"name": "A-B"}]), None),
    "all GPUs by a variable": (
        pod(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
        "NVIDIA_VISIBLE_DEVICES would show the pod devices that it was not given",
    ),
    "a flag that the operator sets": (
        pod(extraArgs=["--model=/other"]),
        "the other flags are set from fields of the object",
    ),
    "a flag twice": (pod(extraArgs=["--seed=1", "--seed=2"]), "extraArgs gives a flag twice"),
    "a flag without dashes": (pod(extraArgs=["seed=1"]), None),
    "a flag and its value apart": (pod(extraArgs=["--seed", "1"]), None),
    "an image with a blank": (pod(image="my image"), None),
    "an image in capitals": (pod(image="example.com/Worker"), None),
    "a pull policy that is not known": (pod(imagePullPolicy="Sometimes"), None),
    "a label that is none": (pod(nodeSelector={"not a label": "x"}), "may only name labels"),
    "a label's value that is none": (pod(nodeSelector={"zone": "-"}), None),
    "a toleration of no key": (toleration(value="a"), "needs the operator Exists"),
    "a toleration with Exists and a value": (
        toleration(key="a", operator="Exists", value="b"),
        "may not have a value",
    ),
    "seconds without NoExecute": (
        toleration(key="a", value="b", tolerationSeconds=5),
        "needs the effect NoExecute",
    ),
    "In without values": (node_term(operator="In"), "the other operators need them"),
    "Exists with values": (node_term(operator="Exists", values=["a"]), "may not have values"),
    "Gt with a word": (node_term(operator="Gt", values=["a"]), "need one whole number"),
    "domains without a must": (
        pod(topologySpread=[{"topologyKey": "zone", "minDomains": 2}]),
        "minDomains needs whenUnsatisfiable: DoNotSchedule",
    ),
    "a spread twice": (
        pod(topologySpread=[{"topologyKey": "zone"}, {"topologyKey": "zone", "maxSkew": 2}]),
        None,
    ),
}

NAMES = {
    "a": True,
    "x" * 40: True,
    "x" * 52: True,
    "x" * 53: False,
    "x" * 63: False,
    "x" * 253: False,
    "with.dot": False,
    "1st": False,
    "a-1": True,
}


@pytest.mark.parametrize("spec", [pytest.param(s, id=i) for i, s in ACCEPTED.items()])
def test_right_documents_are_accepted(spec: dict[str, Any]) -> None:
    DeepSeekDeployment.parse(document(spec))


@pytest.mark.parametrize(
    ("spec", "message"), [pytest.param(*case, id=name) for name, case in REFUSED.items()]
)
def test_wrong_documents_are_refused_with_what_is_allowed(
    spec: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(ValidationError) as refusal:
        DeepSeekDeployment.parse(document(spec))

    assert message is None or message in str(refusal.value)


@pytest.mark.parametrize(("name", "is_allowed"), NAMES.items())
def test_names_are_those_that_every_child_can_carry(name: str, is_allowed: bool) -> None:
    if is_allowed:
        DeepSeekDeployment.parse(document({}, name))
        return
    with pytest.raises(ValidationError, match="must be 1 to 52"):
        DeepSeekDeployment.parse(document({}, name))


@pytest.mark.control_plane
@pytest.mark.parametrize("spec", [pytest.param(s, id=i) for i, s in ACCEPTED.items()])
def test_the_api_server_accepts_right_documents(api_server: Any, spec: dict[str, Any]) -> None:
    answer = api_server.create(PATH, document(spec))

    assert answer.is_accepted, answer.message
    assert answer.body["spec"] == DeepSeekDeployment.parse(document(spec)).document()["spec"]


@pytest.mark.control_plane
@pytest.mark.parametrize(
    ("spec", "message"), [pytest.param(*case, id=name) for name, case in REFUSED.items()]
)
def test_the_api_server_refuses_wrong_documents(
    api_server: Any, spec: dict[str, Any], message: str | None
) -> None:
    answer = api_server.create(PATH, document(spec))

    assert not answer.is_accepted
    assert "spec" in answer.message or "unknown field" in answer.message
    assert message is None or message in answer.message


@pytest.mark.control_plane
@pytest.mark.parametrize(("name", "is_allowed"), NAMES.items())
def test_the_api_server_refuses_names_that_no_service_can_carry(
    api_server: Any, name: str, is_allowed: bool
) -> None:
    answer = api_server.create(PATH, document({}, name))

    assert answer.is_accepted == is_allowed, answer.message
    assert is_allowed or "metadata.name must be 1 to 52" in answer.message


def cached(text: str = "hf://a/b", **cache: Any) -> dict[str, Any]:
    return source(text, cache=cache)


UPDATES = {
    "a cache that grows": (cached(sizeGiB=50), cached(sizeGiB=60), True),
    "a cache that grows from its default": (cached(), cached(sizeGiB=101), True),
    "a cache that shrinks": (cached(sizeGiB=50), cached(sizeGiB=40), False),
    "a cache that shrinks to its default": (cached(sizeGiB=101), cached(), False),
    "another storage class": (
        cached(storageClassName="a"),
        cached(storageClassName="b"),
        False,
    ),
    "another access mode": (cached(), cached(accessMode="ReadWriteMany"), False),
    "the default access mode by name": (cached(), cached(accessMode="ReadWriteOnce"), True),
    "a smaller cache for another source": (
        cached(sizeGiB=50),
        cached("hf://c/d", sizeGiB=40),
        True,
    ),
    "a claim that exists": (cached(sizeGiB=50), cached(existingClaim="c"), True),
    "another source": (source("hf://a/b"), source("pvc://models"), True),
    "other replicas": ({"replicas": 1}, {"replicas": 5}, True),
}


@pytest.mark.parametrize(
    ("old", "new", "is_allowed"), [pytest.param(*case, id=name) for name, case in UPDATES.items()]
)
def test_what_can_reach_the_pods_may_change(
    old: dict[str, Any], new: dict[str, Any], is_allowed: bool
) -> None:
    before = DeepSeekDeployment.parse(document(old)).spec.model
    after = DeepSeekDeployment.parse(document(new)).spec.model

    assert (after.broken_update_rules(before) == []) == is_allowed


@pytest.mark.control_plane
@pytest.mark.parametrize(
    ("old", "new", "is_allowed"), [pytest.param(*case, id=name) for name, case in UPDATES.items()]
)
def test_the_api_server_lets_change_what_can_reach_the_pods(
    api_server: Any, old: dict[str, Any], new: dict[str, Any], is_allowed: bool
) -> None:
    created = api_server.create(PATH, document(old, "changing"), dry_run=False)
    version = created.body["metadata"]["resourceVersion"]
    changed = document(new, "changing")
    changed["metadata"]["resourceVersion"] = version

    answer = api_server.replace(f"{PATH}/changing", changed)

    api_server.client.delete(f"{PATH}/changing")
    assert answer.is_accepted == is_allowed, answer.message
    assert is_allowed or "its sizeGiB cannot shrink" in answer.message


@pytest.mark.control_plane
def test_scale_reads_and_writes_the_replicas(api_server: Any) -> None:
    api_server.create(PATH, document({}, "scaled"), dry_run=False)
    scale = api_server.client.get(f"{PATH}/scaled/scale").json()

    scale["spec"]["replicas"] = 4
    answer = api_server.replace(f"{PATH}/scaled/scale", scale, dry_run=False)
    stored = api_server.client.get(f"{PATH}/scaled").json()

    api_server.client.delete(f"{PATH}/scaled")
    assert answer.is_accepted, answer.message
    assert stored["spec"]["replicas"] == 4
    assert stored["metadata"]["generation"] == 2


SCALED = {"autoscaling": {"maxReplicas": 3}}
REPLICAS = {
    "replicas under autoscaling": (SCALED, SCALED | {"replicas": 2}, False),
    "replicas with the end of autoscaling": (SCALED, {"replicas": 2}, True),
    "replicas with its beginning": ({}, SCALED | {"replicas": 2}, True),
    "other limits": (SCALED, {"autoscaling": {"minReplicas": 2, "maxReplicas": 5}}, True),
}


@pytest.mark.parametrize(
    ("old", "new", "is_allowed"), [pytest.param(*case, id=name) for name, case in REPLICAS.items()]
)
def test_replicas_do_not_change_while_an_autoscaler_sets_them(
    old: dict[str, Any], new: dict[str, Any], is_allowed: bool
) -> None:
    before = DeepSeekDeployment.parse(document(old)).spec
    after = DeepSeekDeployment.parse(document(new)).spec

    assert (after.broken_update_rules(before) == []) == is_allowed


@pytest.mark.control_plane
@pytest.mark.parametrize(
    ("old", "new", "is_allowed"), [pytest.param(*case, id=name) for name, case in REPLICAS.items()]
)
def test_the_api_server_keeps_replicas_while_an_autoscaler_sets_them(
    api_server: Any, old: dict[str, Any], new: dict[str, Any], is_allowed: bool
) -> None:
    created = api_server.create(PATH, document(old, "scaling"), dry_run=False)
    changed = document(new, "scaling")
    changed["metadata"]["resourceVersion"] = created.body["metadata"]["resourceVersion"]

    answer = api_server.replace(f"{PATH}/scaling", changed)

    api_server.client.delete(f"{PATH}/scaling")
    assert answer.is_accepted == is_allowed, answer.message
    assert is_allowed or "replicas is set by autoscaling" in answer.message


def test_every_field_that_is_refused_exists_and_carries_no_default() -> None:
    defaults = DeepSeekDeployment.parse(document({})).document()
    for row in NOT_YET:
        if row.values or row.above is not None:
            continue
        value: Any = defaults
        for step in row.path.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        assert value is None, row.path


def test_a_stored_object_of_a_newer_version_is_read_without_what_is_new() -> None:
    stored = document({"replicas": 2, "newSection": {"a": 1}, "gpu": {"mode": "cpu", "shape": 3}})
    stored["metadata"] |= {"uid": "u", "managedFields": []}
    stored["status"] = {"newField": 1, "conditions": []}

    read = DeepSeekDeployment.from_stored(stored)

    assert read.spec.replicas == 2
    assert read.spec.gpu.mode == "cpu"
