"""The demo: a cluster, the chart, one object, and the model's answer to a question.

    python tools/demo.py up | down

It runs on the local cluster of tools/cluster unless KUBECONFIG names another one. The nodes of that
must be able to pull the two images: name them by DEEPSEEK_OPERATOR_IMAGE and DEEPSEEK_WORKER_IMAGE.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from openai import OpenAI  # noqa: E402

from cluster import Cluster, images, programs  # noqa: E402
from cluster.errors import ClusterError  # noqa: E402
from cluster.progress import phase, say  # noqa: E402

CHART = ROOT / "charts/deepseek-operator"
EXAMPLE = ROOT / "manifests/examples/01-smollm2"
SYSTEM_NAMESPACE = "deepseek-system"
NAMESPACE = "deepseek-demo"
OBJECT = "smollm2"
READY_SECONDS = 600
PROMPT = "The capital of France is"
QUESTION = "Name three planets of the solar system."


@dataclass(frozen=True)
class Target:
    """The cluster that the demo runs on."""

    kubeconfig: str
    operator_image: str
    worker_image: str
    local: Cluster | None
    """The local cluster, whose Services this machine reaches without a tunnel."""

    def run(self, program: str, *words: str) -> str:
        """Run kubectl or helm on it; what it prints.

        Raises:
            ClusterError: It fails; the message has what it said.
        """
        done = subprocess.run(
            [str(programs.path(program)), *words],
            env={**os.environ, "KUBECONFIG": self.kubeconfig},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ClusterError(f"{program} {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def kubectl(self, *words: str) -> str:
        """Run kubectl in the demo's namespace."""
        return self.run("kubectl", f"--namespace={NAMESPACE}", *words)


def up() -> None:
    """Make everything that is missing, ask the model, and say how to go on.

    Raises:
        ClusterError: A step fails.
    """
    started = time.monotonic()
    target = _target()
    with phase("installed the chart"):
        install(target)
    with phase(f"the object {OBJECT!r} is applied"):
        _ensure_namespace(target)
        target.kubectl("apply", "--server-side", "-f", str(EXAMPLE))
    with phase(f"{OBJECT!r} is Ready"):
        _wait_until_ready(target)
    with phase("the model has answered"), _service(target) as address:
        completion, answer, model = ask(f"http://{address}/v1")
    print()
    print(target.kubectl("get", "deepseekdeployments"))
    print(f"{model}, asked through the Service {NAMESPACE}/{OBJECT}:\n")
    print(f"  {PROMPT}{completion}")
    print(f"\n  {QUESTION}")
    print("\n".join(f"  {line}" for line in answer.strip().splitlines()))
    print(_how_to_go_on(target))
    say(f"{time.monotonic() - started:.0f} s in all")


def down() -> None:
    """Remove what the demo made.

    Raises:
        ClusterError: Something could not be removed.
    """
    if _is_elsewhere():
        programs.ensure(["kubectl", "helm"])
        target = Target(_named_cluster(), "", "", None)
        with phase("removed the demo's namespace and the chart"):
            target.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
            target.run("helm", "uninstall", "deepseek", "--namespace", SYSTEM_NAMESPACE,
                       "--ignore-not-found", "--wait")  # fmt: skip
            target.kubectl("delete", "namespace", SYSTEM_NAMESPACE, "--ignore-not-found")
        say("the CRDs stay, and with them the objects of others")
        return
    left = Cluster().down()
    if left:
        raise ClusterError("not everything could be removed:\n  " + "\n  ".join(left))
    say("the local cluster is down; nothing of it is left")


def install(target: Target, *extra: str, chart: Path = CHART) -> None:
    """Install the chart, or upgrade to it, and wait for the operator.

    Raises:
        ClusterError: helm fails, or the operator does not become ready.
    """
    values = []
    for prefix, image in (("", target.operator_image), ("worker.", target.worker_image)):
        repository, _, tag = image.rpartition(":")
        values += [
            "--set-string",
            f"{prefix}image.repository={repository},{prefix}image.tag={tag}",
        ]
    target.run(
        "helm", "upgrade", "--install", "deepseek", str(chart),
        "--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--wait", "--timeout=10m",
        *values, *extra,
    )  # fmt: skip


def ask(base_url: str) -> tuple[str, str, str]:
    """A completion at temperature 0, the answer to a question, and the model's name."""
    with OpenAI(base_url=base_url, api_key="none", max_retries=3, timeout=120) as client:
        model = client.models.list().data[0].id
        completion = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=8, temperature=0
        )
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=48,
            temperature=0,
        )
    return completion.choices[0].text, answer.choices[0].message.content or "", completion.model


def _target() -> Target:
    programs.ensure(["kubectl", "helm"])
    if _is_elsewhere():
        return _somebodys_cluster()
    cluster = Cluster()
    # Before the nodes, which then start with the images in place.
    built = images.ensure()
    cluster.up(metrics=True)
    cluster.load(built.values())
    return Target(str(cluster.kubeconfig), built["operator"], built["worker"], cluster)


def _is_elsewhere() -> bool:
    """Whether KUBECONFIG names a cluster that is not the local one, which `cluster env` names."""
    named = os.environ.get("KUBECONFIG")
    return bool(named) and named != str(Cluster().kubeconfig)


def _named_cluster() -> str:
    kubeconfig = os.environ["KUBECONFIG"]
    say(f"using the cluster of KUBECONFIG={kubeconfig}")
    return kubeconfig


def _somebodys_cluster() -> Target:
    kubeconfig = _named_cluster()
    names = ("DEEPSEEK_OPERATOR_IMAGE", "DEEPSEEK_WORKER_IMAGE")
    missing = [name for name in names if ":" not in os.environ.get(name, "")]
    if missing:
        raise ClusterError(
            f"{' and '.join(missing)} must name images, with their tags, that the cluster's nodes"
            " can pull; build and push them first:\n"
            "  docker build -f operator/Dockerfile -t REGISTRY/deepseek-operator:TAG .\n"
            "  docker build -f worker/Dockerfile -t REGISTRY/deepseek-worker:TAG ."
        )
    return Target(kubeconfig, os.environ[names[0]], os.environ[names[1]], None)


def _ensure_namespace(target: Target) -> None:
    try:
        target.kubectl("get", "namespace", NAMESPACE)
    except ClusterError:
        target.kubectl("create", "namespace", NAMESPACE)
    target.kubectl(
        "label", "namespace", NAMESPACE, "--overwrite",
        "pod-security.kubernetes.io/enforce=restricted",
    )  # fmt: skip


def _wait_until_ready(target: Target) -> None:
    """Wait, and print each new thing that the object says of itself meanwhile."""
    conditions = 'jsonpath={range .status.conditions[?(@.type=="Ready")]}{.status} {.message}{end}'
    deadline = time.monotonic() + READY_SECONDS
    said = ""
    while True:
        state = target.kubectl("get", "deepseekdeployment", OBJECT, "-o", conditions)
        if state.startswith("True"):
            return
        if state != said:
            say(f"          {state.partition(' ')[2] or 'not looked at yet'}")
            said = state
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{OBJECT!r} did not become Ready within {READY_SECONDS} s; it says: {state}"
            )
        time.sleep(1)


@contextmanager
def _service(target: Target) -> Iterator[str]:
    """Host and port at which this machine reaches the Service."""
    if target.local:
        host = target.kubectl("get", "service", OBJECT, "-o", "jsonpath={.spec.clusterIP}")
        yield f"{host}:80"
        return
    tunnel = subprocess.Popen(
        [str(programs.path("kubectl")), f"--namespace={NAMESPACE}", "port-forward",
         f"service/{OBJECT}", ":80"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert tunnel.stdout is not None
        # Forwarding from 127.0.0.1:41234 -> 8000
        line = tunnel.stdout.readline()
        if "->" not in line:
            raise ClusterError(f"kubectl port-forward service/{OBJECT} said {line!r}")
        yield line.split()[2]
    finally:
        tunnel.terminate()
        tunnel.wait()


def _how_to_go_on(target: Target) -> str:
    lines = ["", "Go on with"]
    if target.local:
        lines.append(f'  eval "$({sys.executable} tools/cluster env)"')
    lines += [
        f"  kubectl -n {NAMESPACE} get dsd,pods",
        f"  kubectl -n {NAMESPACE} scale dsd/{OBJECT} --replicas=2",
        f"  kubectl -n {NAMESPACE} describe dsd/{OBJECT}",
    ]
    if target.local:
        host = target.kubectl("get", "service", OBJECT, "-o", "jsonpath={.spec.clusterIP}")
        lines.append(
            f"  curl http://{host}/v1/completions -H 'content-type: application/json'"
            f''' -d '{{"model": "{OBJECT}", "prompt": "Once upon a time", "max_tokens": 32}}\''''
        )
    lines.append("  make demo-down")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Run `up` or `down`; the exit status."""
    actions = {"up": up, "down": down}
    if len(words) != 1 or words[0] not in actions:
        say(f"usage: demo.py {' | '.join(actions)}")
        return 2
    try:
        actions[words[0]]()
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
