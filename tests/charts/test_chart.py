"""What the chart makes of its values, one behaviour a test."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.alias_generators import to_camel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import chart_values  # noqa: E402
import crds  # noqa: E402
import rendering  # noqa: E402
from cluster import ControlPlane  # noqa: E402
from deepseek_contract import metrics  # noqa: E402
from deepseek_operator.permissions import (  # noqa: E402
    KEDA,
    OWN_NAMESPACE,
    SERVED_NAMESPACES,
    WHOLE_CLUSTER,
)
from deepseek_operator.settings import Settings, settings_from, variable_name  # noqa: E402

# helm is one of the local cluster's programs.
pytestmark = pytest.mark.control_plane

Manifest = dict[str, Any]

WITHOUT_CRDS = "--set=crds.enabled=false"
NAMESPACED = ("--set=scope=namespaced", "--set=settings.watchNamespaces={team-a,team-b}")
EVERYTHING = (
    "--set=podMonitor.enabled=true",
    "--set=podLabels.a=b",
    "--set=podAnnotations.a=b",
    "--set=serviceAccount.annotations.a=b",
    "--set=imagePullSecrets[0].name=registry",
    "--set=nodeSelector.zone=a",
    "--set=tolerations[0].operator=Exists",
    "--set=priorityClassName=system-cluster-critical",
    '--set-json=affinity={"nodeAffinity":{}}',
)
LABEL = re.compile("^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
SERVICE_NAME = re.compile("^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")


def only(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    found = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(name)
    ]
    assert len(found) == 1, [manifest["metadata"]["name"] for manifest in found]
    return found[0]


def container(manifests: list[Manifest]) -> Manifest:
    return only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]


def environment(manifests: list[Manifest]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(manifests)["env"]}


def rules(role: Manifest) -> set[tuple[str, str, str]]:
    return {
        (verb, group, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_helm_lints_the_chart_without_a_complaint() -> None:
    said = rendering.helm("lint", "--strict", str(rendering.CHART))

    assert "0 chart(s) failed" in said
    assert "WARNING" not in said


def test_values_are_what_their_models_say() -> None:
    written = yaml.safe_load((rendering.CHART / "values.yaml").read_text())
    defaults = json.loads(chart_values.Values().model_dump_json(by_alias=True))

    assert written == defaults


def leaves(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Each value that can be set, by its path."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found


DEFAULTS = leaves(yaml.safe_load((rendering.CHART / "values.yaml").read_text()))
# Values that are not just any other text or number.
OTHER = {
    "settings.workerStateUrl": "http://responder.example/{namespace}/{pod}",
    "image.digest": f"sha256:{'0' * 64}",
    "worker.image.digest": f"sha256:{'0' * 64}",
    "image.pullPolicy": "Always",
    "settings.imagePullPolicy": "Never",
    "settings.logLevel": "debug",
    "settings.logFormat": "text",
    "settings.huggingFaceEndpoint": "https://mirror.example",
    "settings.prometheusUrl": "https://prometheus.example",
    "podMonitor.enabled": True,
    "imagePullSecrets": [{"name": "a"}],
    "tolerations": [{"operator": "Exists"}],
}


@pytest.mark.parametrize("path", [path for path in DEFAULTS if path != "scope"])
def test_each_value_makes_a_difference(chart: Any, path: str) -> None:
    default = DEFAULTS[path]
    other = OTHER.get(path)
    if other is None:
        match default:
            case bool():
                other = not default
            case int() | float():
                other = default + 1
            case list():
                other = ["another"]
            case dict():
                other = {"a": "b"}
            case _:
                other = "another"
    context: tuple[str, ...] = ("--set=podMonitor.enabled=true",)
    match path:
        case "settings.watchNamespaces":
            context = ("--set=scope=namespaced", '--set-json=settings.watchNamespaces=["team-a"]')
        case "podMonitor.enabled":
            context = ()
        case "serviceAccount.create":
            context = ("--set=serviceAccount.name=mine",)

    changed = chart.render(*context, f"--set-json={path}={json.dumps(other)}")

    assert changed != chart.render(*context)


def test_each_setting_reaches_the_operator_as_it_was_given(chart: Any) -> None:
    changed = {
        "watchNamespaces": ["team-a"],
        "prometheusNamespaces": ["prometheus", "thanos"],
        "clientNamespaces": ["*"],
        "imagePullPolicy": "Always",
        "huggingFaceEndpoint": "http://mirror.example:8080/hub",
        "volumeGroup": 5_000_000,
        "keda": True,
        "gatewayApi": True,
        "prometheusUrl": "https://prometheus.example/prefix",
        "httpPort": 9090,
        "logLevel": "debug",
        "logFormat": "text",
        "leaseName": "other",
        "leaseDurationSeconds": 3_000_000,
        "resyncSeconds": 7.5,
        "maxConcurrentReconciles": 4,
        "apiTimeoutSeconds": 2_000_000,
        "apiRetries": 0,
        "watchSeconds": 60,
        "probeSeconds": 5,
        "probeTimeoutSeconds": 0.5,
        "maxConcurrentProbes": 1_000_000,
        "workerStateUrl": "http://responder.example:8080/{namespace}/{pod}",
    }
    flag = f"--set-json=settings={json.dumps(changed)}"

    manifests = chart.render(flag, "--set=scope=namespaced", "--set=worker.image.tag=v1")

    given = environment(manifests)
    assert set(given) == {variable_name(field) for field in Settings.model_fields}
    derived = {"namespace", "identity", "pod_uid", "worker_image"}
    assert {to_camel(field) for field in Settings.model_fields if field not in derived} == set(
        changed
    )
    settings = settings_from(given | {variable_name("namespace"): "x"})
    for field in Settings.model_fields:
        if field not in derived:
            wanted = changed[to_camel(field)]
            assert getattr(settings, field) == (
                tuple(wanted) if isinstance(wanted, list) else wanted
            )
    assert settings.worker_image == "deepseek-worker:v1"


def test_default_settings_are_the_operators_own(chart: Any) -> None:
    given = environment(chart.render())

    settings = settings_from(given | {variable_name("namespace"): "deepseek-system"})

    assert settings == Settings(worker_image=f"deepseek-worker:{app_version()}")


def app_version() -> str:
    version: str = yaml.safe_load((rendering.CHART / "Chart.yaml").read_text())["appVersion"]
    return version


def test_a_group_that_the_platform_chooses_is_an_empty_setting(chart: Any) -> None:
    given = environment(chart.render("--set=settings.volumeGroup=null"))

    assert given[variable_name("volume_group")] == ""


def test_no_object_names_a_user_or_group_by_number(chart: Any) -> None:
    text = json.dumps(chart.render(WITHOUT_CRDS, "--set=settings.volumeGroup=null"))

    assert not re.search(r'"(runAsUser|runAsGroup|fsGroup|supplementalGroups)"', text)


def test_the_operator_meets_the_restricted_pod_security_standard(chart: Any) -> None:
    pod = only(chart.render(), "Deployment")["spec"]["template"]["spec"]

    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert all(set(volume) <= {"name", "emptyDir"} for volume in pod["volumes"])


@pytest.mark.parametrize(
    ("flags", "operator", "worker"),
    [
        pytest.param((), f"deepseek-operator:{app_version()}", f"deepseek-worker:{app_version()}",
                     id="the chart's appVersion"),
        pytest.param(
            ("--set=image.tag=a,worker.image.tag=b",), "deepseek-operator:a", "deepseek-worker:b",
            id="tags",
        ),
        pytest.param(
            (f"--set=image.digest=sha256:{'0' * 64},image.repository=r.example/op",
             "--set=worker.image.repository=r.example:5000/w"),
            f"r.example/op@sha256:{'0' * 64}", f"r.example:5000/w:{app_version()}",
            id="digest and registries",
        ),
    ],
)  # fmt: skip
def test_images_are_named_by_digest_tag_or_version(
    chart: Any, flags: tuple[str, ...], operator: str, worker: str
) -> None:
    manifests = chart.render(*flags)

    assert container(manifests)["image"] == operator
    assert environment(manifests)[variable_name("worker_image")] == worker


def test_a_cluster_wide_operator_has_a_cluster_role_with_exactly_its_calls(chart: Any) -> None:
    manifests = chart.render()

    role = only(manifests, "ClusterRole", "system.deepseek-deepseek-operator")
    wanted = {
        (verb, rule.group, rule.resource)
        for rule in (*SERVED_NAMESPACES, *WHOLE_CLUSTER)
        for verb in rule.verbs
    }
    assert rules(role) == wanted
    assert only(manifests, "ClusterRoleBinding")["roleRef"]["name"] == role["metadata"]["name"]


def test_the_lease_is_the_only_right_in_the_operators_own_namespace(chart: Any) -> None:
    role = only(chart.render("--set=settings.leaseName=mine"), "Role")

    assert role["metadata"]["namespace"] == "deepseek-system"
    assert rules(role) == {
        (verb, rule.group, rule.resource) for rule in OWN_NAMESPACE for verb in rule.verbs
    }
    assert [rule.get("resourceNames") for rule in role["rules"]] == [None, ["mine"]]


def test_a_namespaced_operator_has_a_role_in_each_namespace_and_nothing_of_the_cluster(
    chart: Any,
) -> None:
    manifests = chart.render(*NAMESPACED, WITHOUT_CRDS)

    assert not [m for m in manifests if m["kind"].startswith(("Cluster", "Custom"))]
    roles = [m for m in manifests if m["kind"] == "Role" and "lease" not in m["metadata"]["name"]]
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b"]
    for role in roles:
        assert rules(role) == {
            (verb, rule.group, rule.resource) for rule in SERVED_NAMESPACES for verb in rule.verbs
        }
    bindings = [m for m in manifests if m["kind"] == "RoleBinding"]
    assert {m["subjects"][0]["namespace"] for m in bindings} == {"deepseek-system"}
    assert environment(manifests)[variable_name("watch_namespaces")] == "team-a,team-b"


def test_what_a_namespaced_operator_cannot_do_is_said_in_the_notes() -> None:
    said = rendering.helm(
        "install", "deepseek", str(rendering.CHART), "--dry-run=client", *NAMESPACED,
        WITHOUT_CRDS,
    )  # fmt: skip

    assert "The operator serves the namespaces team-a, team-b." in said
    assert "no tenants and sees no nodes" in said


def test_people_who_edit_a_namespace_edit_its_deployments(chart: Any) -> None:
    manifests = chart.render()

    edit = only(manifests, "ClusterRole", ".edit")
    view = only(manifests, "ClusterRole", ".view")
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert ("create", "deepseek.dev", "deepseekdeployments") in rules(edit)
    assert {verb for verb, _, _ in rules(view)} == {"get", "list", "watch"}
    assert len([m for m in chart.render("--set=rbac.aggregate=false")
                if m["kind"] == "ClusterRole"]) == 1  # fmt: skip


def test_crds_are_upgraded_with_the_release_and_stay_when_it_goes(chart: Any) -> None:
    definitions = [m for m in chart.render() if m["kind"] == "CustomResourceDefinition"]

    assert [m["spec"] for m in definitions] == [
        crds.custom_resource_definition(resource)["spec"] for resource in crds.ALL
    ]
    for definition in definitions:
        assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not (rendering.CHART / "crds").exists()
    assert not [m for m in chart.render(WITHOUT_CRDS) if m["kind"] == "CustomResourceDefinition"]


def test_nothing_of_the_chart_can_hold_up_its_removal(chart: Any) -> None:
    text = json.dumps(chart.render(WITHOUT_CRDS, *EVERYTHING))

    assert "finalizers" not in text
    assert "helm.sh/hook" not in text
    assert "WebhookConfiguration" not in text


def test_only_prometheus_reaches_the_operator(chart: Any) -> None:
    policy = only(chart.render("--set=settings.prometheusNamespaces={a,b}"), "NetworkPolicy")

    expression = policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"]["matchExpressions"][0]
    assert expression["values"] == ["a", "b"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    closed = only(chart.render("--set-json=settings.prometheusNamespaces=[]"), "NetworkPolicy")
    assert not closed["spec"].get("ingress")
    kinds = {m["kind"] for m in chart.render("--set=networkPolicy.enabled=false")}
    assert "NetworkPolicy" not in kinds


def test_pod_monitors_find_the_operator_and_the_workers(chart: Any) -> None:
    assert "PodMonitor" not in {m["kind"] for m in chart.render()}
    monitored = chart.render("--set=podMonitor.enabled=true,podMonitor.labels.release=kps")
    operator = only(monitored, "PodMonitor", "operator")
    workers = only(monitored, "PodMonitor", "-workers")

    labels = only(monitored, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert operator["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"] for port in container(monitored)["ports"]}
    assert operator["spec"]["podMetricsEndpoints"][0]["port"] in ports
    assert workers["spec"]["namespaceSelector"] == {"any": True}
    assert workers["metadata"]["labels"]["release"] == "kps"
    targets = {
        rule["targetLabel"] for rule in workers["spec"]["podMetricsEndpoints"][0]["relabelings"]
    }
    assert targets == {"deployment", "tier"}
    in_two = only(
        chart.render("--set=podMonitor.enabled=true", *NAMESPACED), "PodMonitor", "-workers"
    )
    assert in_two["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}


def test_pod_monitors_are_made_where_the_cluster_knows_them(chart: Any) -> None:
    known = "--api-versions=monitoring.coreos.com/v1/PodMonitor"

    assert "PodMonitor" in {m["kind"] for m in chart.render(known)}
    never = chart.render(known, "--set=podMonitor.enabled=false")
    assert "PodMonitor" not in {m["kind"] for m in never}
    # What is bridged is one minute, which has to hold some scrapes.
    assert "intervalSeconds" in chart.refusal("--set=podMonitor.intervalSeconds=60")


def test_the_adapter_s_rules_can_be_had_as_a_config_map_and_as_values(chart: Any) -> None:
    rules = only(chart.render("--set=prometheusAdapter.configMap=true"), "ConfigMap", "-rules")
    values = yaml.safe_load((rendering.CHART / "files/adapter-values.yaml").read_text())

    given = yaml.safe_load(rules["data"]["config.yaml"])["externalRules"]

    assert given == values["rules"]["external"]
    assert [rule["name"]["matches"] for rule in given] == [
        metric.name for metric in metrics.SCALING_METRICS
    ]


def test_what_the_rules_go_by_is_what_both_ways_to_scrape_give(chart: Any) -> None:
    """Cases B02 and B03: the series carry the worker's pod and namespace, however scraped."""
    monitor = only(chart.render("--set=podMonitor.enabled=true"), "PodMonitor", "-workers")
    (job,) = yaml.safe_load((rendering.CHART / "files/scrape-config.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]

    # The Prometheus operator adds these two by itself.
    by_monitor = {"namespace", "pod"} | {rule["targetLabel"] for rule in endpoint["relabelings"]}
    by_job = {rule.get("target_label") for rule in job["relabel_configs"]}

    assert set(metrics.TARGET_LABELS) <= by_monitor
    assert set(metrics.TARGET_LABELS) <= by_job


def test_the_rights_on_kedas_objects_are_there_where_keda_is(chart: Any) -> None:
    right = ("create", "keda.sh", "scaledobjects")

    without = only(chart.render(), "ClusterRole", "deepseek-operator")
    with_keda = only(chart.render("--set=settings.keda=true"), "ClusterRole", "deepseek-operator")

    assert right not in rules(without)
    assert rules(with_keda) - rules(without) == {
        (verb, rule.group, rule.resource) for rule in KEDA for verb in rule.verbs
    }


def test_a_service_account_of_somebody_else_is_used_everywhere(chart: Any) -> None:
    manifests = chart.render("--set=serviceAccount.create=false,serviceAccount.name=mine")

    assert "ServiceAccount" not in {m["kind"] for m in manifests}
    assert only(manifests, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    for manifest in manifests:
        if manifest["kind"].endswith("RoleBinding"):
            assert [subject["name"] for subject in manifest["subjects"]] == ["mine"]
    alone = chart.render("--set=serviceAccount.create=false,rbac.create=false")
    assert not {m["kind"] for m in alone} & {"ServiceAccount", "Role", "ClusterRole"}


RELEASES = {
    "a short name": ("a", ()),
    "a digit first": ("1st", ()),
    "a dot": ("team.prod", ()),
    "a dash at the cut": ("x" * 51 + "-y", ()),
    "the longest name": ("x" * 53, ()),
    "the chart's name": ("deepseek-operator", ()),
    "a part of its own": ("a", ("--set=nameOverride=operator",)),
    "a name of its own": ("a", ("--set=fullnameOverride=my-operator",)),
    "the longest name of its own": ("a", (f"--set=fullnameOverride={'n' * 53}",)),
    "the longest part of its own": ("b" * 53, (f"--set=nameOverride={'n' * 53}",)),
}


@pytest.mark.parametrize(
    ("release", "flags"), [pytest.param(*case, id=name) for name, case in RELEASES.items()]
)
def test_names_and_labels_are_legal_for_every_release(
    chart: Any, release: str, flags: tuple[str, ...]
) -> None:
    namespace = "n" * 63
    manifests = chart.render(
        WITHOUT_CRDS, *EVERYTHING, *flags, release=release, namespace=namespace
    )

    for manifest in manifests:
        name = manifest["metadata"]["name"]
        is_of_the_cluster = manifest["kind"].startswith(("Cluster", "Validating"))
        longest = 253 if is_of_the_cluster else 63
        assert len(name) <= longest
        assert SERVICE_NAME.match(name.removeprefix(f"{namespace}.").split(".")[0]), name
        for value in manifest["metadata"]["labels"].values():
            assert LABEL.match(value), value


def test_no_two_releases_share_an_object_of_the_cluster(chart: Any) -> None:
    releases = [
        ("deepseek-b", "a"),
        ("b", "a-deepseek"),
        ("deepseek-b-edit", "a"),
        ("deepseek-b.edit", "a-edit"),
    ]
    names = [
        (manifest["kind"], manifest["metadata"]["name"])
        for release, namespace in releases
        for manifest in chart.render(
            WITHOUT_CRDS,
            *EVERYTHING,
            f"--set=fullnameOverride={release.replace('.', '-')}",
            release=release,
            namespace=namespace,
        )
        if manifest["kind"].startswith(("Cluster", "Validating"))
    ]

    assert len(names) == len(set(names)) > len(releases)


NUMBERS = (
    "--set-json=settings.watchNamespaces=" + '["1", "1e3", "true"]',
    "--set-string=serviceAccount.name=5,priorityClassName=7,nameOverride=true,fullnameOverride=null",
)


@pytest.mark.parametrize("scope", ["cluster", "namespaced"])
def test_names_that_yaml_reads_as_something_else_stay_text(chart: Any, scope: str) -> None:
    watched, names = NUMBERS
    flags = ("--set=scope=namespaced", watched) if scope == "namespaced" else ()
    manifests = chart.render(
        WITHOUT_CRDS, *EVERYTHING, names, *flags, release="123", namespace="2024"
    )

    assert only(manifests, "Deployment")["metadata"] | {"labels": {}} == {
        "name": "null", "namespace": "2024", "labels": {},
    }  # fmt: skip
    for place, value in texts(manifests):
        assert isinstance(value, str), place


def texts(part: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is a name, a namespace or a label."""
    named = {"name", "namespace", "serviceAccountName", "priorityClassName"}
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        path = f"{place}/{key}"
        if key in named:
            yield path, value
        elif key in {"labels", "matchLabels", "matchNames"}:
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{path}/{entry}", text) for entry, text in entries)
        elif isinstance(value, dict | list):
            yield from texts(value, path)


def test_a_name_of_its_own_is_the_name(chart: Any) -> None:
    manifests = chart.render("--set=fullnameOverride=mine")

    assert only(manifests, "Deployment")["metadata"]["name"] == "mine"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--set=replicas=2", "additional properties 'replicas' not allowed"),
        ("--set=settings.watchNamespace={a}", "additional properties 'watchNamespace' not allowed"),
        ("--set=image.tags=v1", "additional properties 'tags' not allowed"),
        ("--set=scope=namespace", "/scope"),
        ("--set=scope=namespaced", "/settings/watchNamespaces"),
        ("--set=settings.watchNamespaces={a}", "/settings/watchNamespaces"),
        ("--set=settings.httpPort=0", "/settings/httpPort"),
        ("--set=settings.httpPort=http", "/settings/httpPort"),
        ("--set=settings.logLevel=loud", "/settings/logLevel"),
        ("--set=settings.prometheusNamespaces=a", "/settings/prometheusNamespaces"),
        ("--set=settings.prometheusNamespaces={A}", "/settings/prometheusNamespaces/0"),
        ("--set=settings.huggingFaceEndpoint=ftp://x", "/settings/huggingFaceEndpoint"),
        ("--set=image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("--set=image.digest=sha256:00", "/image/digest"),
        ("--set=fullnameOverride=Mine", "/fullnameOverride"),
        ("--set=nameOverride=-a", "/nameOverride"),
        ("--set=podMonitor.intervalSeconds=0", "/podMonitor/intervalSeconds"),
        ("--set=imagePullSecrets={a}", "/imagePullSecrets/0"),
    ],
)
def test_wrong_values_are_refused_by_name(chart: Any, flag: str, said: str) -> None:
    assert said in chart.refusal(flag)


@pytest.mark.parametrize(
    ("path", "key", "own"),
    [
        ("podLabels", "app.kubernetes.io/name", "deepseek-operator"),
        ("podLabels", "app.kubernetes.io/instance", "deepseek"),
        ("podMonitor.labels", "app.kubernetes.io/name", "deepseek-operator"),
        ("podMonitor.labels", "app.kubernetes.io/managed-by", "Helm"),
        ("podMonitor.labels", "helm.sh/chart", f"deepseek-operator-{app_version()}"),
    ],
)
def test_a_label_that_the_chart_sets_itself_is_refused(
    chart: Any, path: str, key: str, own: str
) -> None:
    """It would stand in the manifest twice, and which one counts is up to who reads it."""
    said = chart.refusal(
        "--set=podMonitor.enabled=true", f"--set-json={path}={json.dumps({'a': 'b', key: 'mine'})}"
    )

    assert f"{path} has {key}=mine, but the chart sets that label itself, to {own};" in said
    assert f"{path} may have any labels but app.kubernetes.io/instance, " in said


def test_no_manifest_names_a_key_twice() -> None:
    text = rendering.template("deepseek", WITHOUT_CRDS, *EVERYTHING, "--set=podMonitor.labels.a=b")

    class Once(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), node.start_mark
            return super().construct_mapping(node, deep)

    assert list(yaml.load_all(text, Once))


def test_the_api_server_takes_every_object_of_every_scope(chart: Any) -> None:
    scopes: dict[str, tuple[str, ...]] = {
        "deepseek": (),
        "others": NAMESPACED,
        "x" * 53: EVERYTHING,
    }
    with ControlPlane("chart-tests", components=()) as control_plane:
        for namespace in ("deepseek-system", "team-a", "team-b"):
            control_plane.apply(
                {
                    "apiVersion": "v1",
                    "kind": "Namespace",
                    "metadata": {
                        "name": namespace,
                        "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
                    },
                }
            )
        for release, flags in scopes.items():
            manifests = [
                manifest
                for manifest in chart.render(*flags, release=release)
                if manifest["kind"] != "PodMonitor"
            ]
            document = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
            said = control_plane.kubectl(
                "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
                stdin=document,
            )  # fmt: skip
            assert said.count("serverside-applied (server dry run)") == len(manifests)
        pod = only(chart.render(), "Deployment")["spec"]["template"]
        pod |= {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"] |= {"name": "operator", "namespace": "deepseek-system"}
        pod["spec"]["serviceAccountName"] = "default"
        control_plane.apply(
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default", "namespace": "deepseek-system"},
            }
        )
        said = control_plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        assert "created (server dry run)" in said
