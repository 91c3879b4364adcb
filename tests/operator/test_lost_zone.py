"""A zone with a third of a fleet falls silent, and comes back.

The nodes are not deleted, and Kubernetes evicts as slowly as it does by default, so what serves
again does so by the operator's hand: pods leave their silent nodes, those that find no place are
degraded, and when the zone is back all are promoted.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from figures import origin, record, row
from real import Killer, Operator
from simulated import FULL, SMALL, Key, Service, SimulatedFleet, Size, simulated

pytestmark = pytest.mark.control_plane


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[SimulatedFleet]:
    size: Size = request.param
    with simulated("lost-zone-tests", size) as found:
        found.fill()
        yield found


@pytest.fixture
def operator(fleet: SimulatedFleet, tmp_path: Path) -> Iterator[Operator]:
    settings = {"WORKER_STATE_URL": fleet.responder.url, "LEASE_DURATION_SECONDS": "15"}
    found = Operator(
        fleet.server, "deepseek-system", tmp_path, settings=settings, cluster_wide=True
    )
    found.install()
    found.start()
    found.lead()
    yield found
    found.stop(signal.SIGKILL)


def calls(operator: Operator) -> Counter[str]:
    """Requests to the API server so far, by verb and resource, without watches and the Lease."""
    return Counter(
        {
            f"{verb} {resource}": number
            for (verb, resource), number in operator.requests().items()
            if verb != "watch" and not resource.startswith("leases")
        }
    )


def until_quiet(fleet: SimulatedFleet, operator: Operator) -> None:
    """Wait until the operator writes nothing for some seconds."""
    last: dict[tuple[str, str], int] = {}
    deadline = time.monotonic() + fleet.size.limit_seconds
    while (now := operator.writes()) != last:
        assert time.monotonic() < deadline, f"it never is quiet: {now}"
        last = now
        time.sleep(3)


def until_served(fleet: SimulatedFleet, affected: set[Key], lost: set[str]) -> dict[Key, Service]:
    """Wait until every deployment that the zone took something of is served elsewhere."""
    served: dict[Key, Service] = {}

    def unserved() -> dict[Key, object]:
        served.clear()
        served.update(fleet.served(without=lost))
        missing = affected - served.keys()
        statuses = fleet.statuses() if missing else {}
        return {key: statuses[key]["conditions"] for key in missing}

    fleet.until_none(unserved, "all are served again")
    return {key: served[key] for key in affected}


def degradations(fleet: SimulatedFleet) -> dict[Key, int]:
    return {
        key: (status.get("degrade") or {}).get("degradations", 0)
        for key, status in fleet.statuses().items()
    }


def node_switches(fleet: SimulatedFleet) -> dict[Key, int]:
    return {
        key: (status.get("recovery") or {}).get("nodeSwitches", 0)
        for key, status in fleet.statuses().items()
    }


@pytest.mark.parametrize(
    ("fleet", "is_killed"),
    [
        pytest.param(SMALL, False, id="a hundred nodes", marks=pytest.mark.timeout(400)),
        pytest.param(
            SMALL, True, id="a hundred nodes, and an operator that is killed again and again",
            marks=[pytest.mark.long, pytest.mark.timeout(900)],
        ),
        pytest.param(
            FULL, False, id="a thousand nodes",
            marks=[pytest.mark.long, pytest.mark.timeout(1800)],
        ),
    ],
    indirect=["fleet"],
)  # fmt: skip
def test_all_that_a_lost_zone_takes_is_served_elsewhere_and_promoted_when_it_is_back(
    fleet: SimulatedFleet, operator: Operator, *, is_killed: bool
) -> None:
    load_before = os.getloadavg()[0]
    fleet.serve()
    until_quiet(fleet, operator)
    lost = fleet.nodes_of("zone-a")
    before = calls(operator)

    with Killer(operator, "a lost zone", between=(2.0, 12.0)) if is_killed else nullcontext():
        affected = fleet.lose_zone()
        fleet.until(lambda: len(fleet.silent_nodes()) == len(lost), "the zone is NotReady")
        last_not_ready = max(fleet.silent_nodes().values())
        served = until_served(fleet, affected, lost)
        calls_away: Counter[str] = Counter()
        if not is_killed:
            until_quiet(fleet, operator)
            calls_away = calls(operator) - before
        steady(fleet, affected, lost, served)
        away = degradations(fleet)
        tiers = Counter(service.tier for service in served.values())

        before_return = calls_away if is_killed else calls(operator)
        fleet.return_zone()
        fleet.until(lambda: not fleet.silent_nodes(), "the zone is Ready again")
        last_ready = max(fleet.ready_nodes().values())
        fleet.until_all_are_on_their_primary()
        back_seconds = (datetime.now(UTC) - last_ready).total_seconds()

    assert set(tiers) == {"primary", "small"}
    degraded = {key for key, service in served.items() if service.tier == "small"}
    assert {key for key, number in away.items() if number} >= degraded
    # Nothing flaps: one switch at most, and no deployment that lost nothing has any.
    assert max(away.values()) == 1
    assert {key for key, number in away.items() if number} <= affected
    assert degradations(fleet) == away
    fleet.until(lambda: not fleet.in_quarantine(), "nothing is left in quarantine")
    assert {key for key, number in node_switches(fleet).items() if number} <= affected
    if is_killed:
        return
    assert operator.process is not None
    assert operator.process.poll() is None
    until_quiet(fleet, operator)
    if fleet.size == FULL:
        away_seconds = [(found.since - last_not_ready).total_seconds() for found in served.values()]
        figures = rows_of(
            fleet, operator, origin(load_before), seconds=max(away_seconds),
            back_seconds=back_seconds, tiers=tiers, switches=max(away.values()),
            moves=max(node_switches(fleet).values()), calls_away=calls_away,
            calls_back=calls(operator) - before_return,
        )  # fmt: skip
        record(figures)


def steady(
    fleet: SimulatedFleet, affected: set[Key], lost: set[str], served: dict[Key, Service]
) -> None:
    """For a while everything goes on being served by the tier that took over."""
    deadline = time.monotonic() + fleet.size.steady_seconds
    while time.monotonic() < deadline:
        now = fleet.served(without=lost)
        assert {key: now[key].tier for key in affected if key in now} == {
            key: service.tier for key, service in served.items()
        }
        time.sleep(2)


def rows_of(
    fleet: SimulatedFleet, operator: Operator, about: dict[str, Any], *, seconds: float,
    back_seconds: float, tiers: Counter[str], switches: int, moves: int,
    calls_away: Counter[str], calls_back: Counter[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """The figures of the full size."""
    size = fleet.size
    about = {"note": "`make test-long`", **about}
    where = (
        f"{size.num_deployments} deployments of {size.num_tenants} tenants, {size.num_nodes} nodes,"
        f" {size.num_foreign_pods} foreign GPU pods, a zone of a third falls silent"
    )
    return [
        row(
            "zone_served_again", f"{where}: from the last NotReady until each deployment that it"
            " took is served elsewhere", seconds, "s", 120.0,
            replaced=tiers["primary"], degraded=tiers["small"], **about,
        ),
        row(
            "zone_tier_switches", "the same: most switches to a fallback of one deployment",
            switches, "switches", 1, most_pods_moved=moves, **about,
        ),
        row(
            "zone_promoted", "the same: from the zone's last Ready until all are promoted,"
            f" promote.afterSeconds ({size.promote_seconds}) included", back_seconds, "s", **about,
        ),
        row(
            "zone_peak_memory", "the same: peak memory of the operator", operator.peak_mib,
            "MiB", 300.0, **about,
        ),
        row(
            "zone_calls_away", "the same: API calls for each deployment that is replaced or"
            " degraded", calls_away.total() / tiers.total(), "requests",
            calls=dict(calls_away.most_common()), **about,
        ),
        row(
            "zone_calls_back", "the same: API calls for each deployment that is promoted",
            calls_back.total() / tiers["small"], "requests",
            calls=dict(calls_back.most_common()), **about,
        ),
    ]  # fmt: skip
