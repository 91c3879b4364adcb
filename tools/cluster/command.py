"""The command line: up, down, status, env, images, node and gpus."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence

from cluster import images, places, policies
from cluster.cluster import DEFAULT_NAME, Cluster
from cluster.errors import ClusterError
from cluster.progress import say


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(words)
    try:
        return int(options.run(options))
    except ClusterError as error:
        say(f"error: {error}")
        if options.run is _up:
            say("what was started is still there; end it with: " + _again("down", options))
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster", description="A real Kubernetes cluster on this machine, without Docker."
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster (%(default)s)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start the cluster, or say that it is up")
    up.add_argument("--nodes", type=int, default=2, help="number of nodes (%(default)s)")
    up.add_argument("--images", action="store_true", help="build and load the project's images")
    up.add_argument("--metrics", action="store_true", help="run Prometheus and its adapter")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="end the cluster and everything that it started")
    down.set_defaults(run=_down)

    status = commands.add_parser("status", help="say what runs")
    status.set_defaults(run=_status)

    env = commands.add_parser("env", help="print shell lines that point kubectl and helm at it")
    env.set_defaults(run=_env)

    build = commands.add_parser("images", help="build the images; prints their names as JSON")
    build.set_defaults(run=_images)

    node = commands.add_parser("node", help="stop a node like a power cut, start it, cut its cable")
    node.add_argument("action", choices=("stop", "start", "unplug", "plug"))
    node.add_argument("node")
    node.set_defaults(run=_node)

    gpus = commands.add_parser("gpus", help="let a node offer GPUs that are not there")
    gpus.add_argument("node")
    gpus.add_argument("units", nargs="+", metavar="UNIT=NUMBER", help="gpu=2, mig-1g.18gb=3")
    gpus.set_defaults(run=_gpus)

    # Not for people: `up` starts it.
    enforce = commands.add_parser("enforce")
    enforce.set_defaults(run=_enforce)
    return parser


def _up(options: argparse.Namespace) -> int:
    cluster = Cluster(options.name, num_nodes=options.nodes)
    was_up = cluster.up(with_images=options.images, metrics=options.metrics)
    say(f"cluster {cluster.name!r} {'was already up' if was_up else 'is up'}; use it with:")
    say(f'  eval "$({_again("env", options)})"')
    say(f"end it with: {_again('down', options)}")
    return 0


def _down(options: argparse.Namespace) -> int:
    left = Cluster(options.name).down()
    if left:
        raise ClusterError("not everything could be removed:\n  " + "\n  ".join(left))
    say(f"cluster {options.name!r} is down; nothing of it is left")
    return 0


def _status(options: argparse.Namespace) -> int:
    cluster = Cluster(options.name)
    if not cluster.is_up:
        started = cluster.state.exists()
        say(f"cluster {cluster.name!r} is {'half-way up; run up or down' if started else 'down'}")
        return 1
    say(f"cluster {cluster.name!r} is up; API server {cluster.control_plane.server}")
    for node in cluster.nodes:
        say(f"  {node.name}  {node.network.address}  "
            f"{'running' if node.namespaces else 'stopped'}")  # fmt: skip
    say(cluster.control_plane.kubectl("get", "nodes,pods", "-A", "-o", "wide").rstrip())
    return 0


def _env(options: argparse.Namespace) -> int:
    cluster = Cluster(options.name)
    if not cluster.is_up:
        raise ClusterError(f"cluster {cluster.name!r} is not up; run: {_again('up', options)}")
    folder = cluster.link_programs()
    print(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
    print(f'export PATH={shlex.quote(str(folder))}:"$PATH"')
    return 0


def _images(options: argparse.Namespace) -> int:
    references = images.ensure()
    cluster = Cluster(options.name)
    if cluster.is_up:
        cluster.load(list(references.values()))
    print(json.dumps(references))
    return 0


def _node(options: argparse.Namespace) -> int:
    cluster = Cluster(options.name)
    if options.action == "stop":
        cluster.stop_node(options.node)
    elif options.action == "start":
        cluster.start_node(options.node)
    else:
        cluster.set_cable(options.node, connected=options.action == "plug")
    return 0


def _gpus(options: argparse.Namespace) -> int:
    units = {}
    for word in options.units:
        name, _, number = word.partition("=")
        if not number.isdigit():
            raise ClusterError(f"{word!r} is no UNIT=NUMBER, for example gpu=2 or mig-1g.18gb=3")
        units[name] = int(number)
    Cluster(options.name).set_gpus(options.node, units)
    return 0


def _enforce(options: argparse.Namespace) -> int:
    policies.enforce(Cluster(options.name))
    return 0


def _again(command: str, options: argparse.Namespace) -> str:
    name = "" if options.name == DEFAULT_NAME else f"--name {shlex.quote(options.name)} "
    return f"{sys.executable} {places.SOURCE} {name}{command}"
