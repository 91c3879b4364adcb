"""`deepseek-operator run`: the process. Takes the Lease, then works until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from deepseek_operator.api import Api, Attributes, Recorder
from deepseek_operator.controller import Controller
from deepseek_operator.errors import ApiError, SettingsError
from deepseek_operator.handlers import Watcher
from deepseek_operator.health import Health, serve
from deepseek_operator.lease import Lease
from deepseek_operator.logs import configure_logs
from deepseek_operator.metrics import Metrics
from deepseek_operator.settings import Settings, settings_from
from deepseek_operator.survey import Survey

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_LEASE_LOST, EXIT_SETTINGS = 0, 1, 2
START_AGAIN_SECONDS = 5.0
REDISCOVER_SECONDS = 60.0
"""How often to look whether CRDs of others, such as the Gateway API's, came or changed."""
GRACE_SECONDS = 3.0
"""How long work that goes on may take to end when the process stops."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="deepseek-operator", description=__doc__)
    parser.add_argument("command", choices=["run"], help="run the operator until it is stopped")
    parser.parse_args(arguments)
    try:
        settings = settings_from(os.environ)
    except SettingsError as error:
        sys.stderr.write(f"deepseek-operator: {error}\n")
        return EXIT_SETTINGS
    configure_logs(settings.log_level, settings.log_format)
    return asyncio.run(run(settings))


async def run(settings: Settings) -> int:
    """Serve health, take the Lease, work, and stop on SIGTERM, SIGINT or a lost Lease."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    health = Health(settings.watch_seconds, Metrics())
    server = await serve(health, settings.http_port)
    try:
        return await operate(settings, health, stop)
    finally:
        await server.cleanup()


async def operate(settings: Settings, health: Health, stop: asyncio.Event) -> int:
    """Everything but the process's own surroundings; returns the exit code once it has ended."""

    def record(attributes: Attributes, code: str) -> None:
        health.metrics.count_request(attributes, code)
        if attributes.verb == "watch" and code == "200":
            health.heard()

    api = await Api.connect(settings, record)
    # With connections of its own: where hundreds of objects are written to a slow server, a renewal
    # would wait for its turn until the Lease is lost.
    lease_api = await Api.connect(settings, record)
    lease = Lease(lease_api, settings)
    stopped = asyncio.create_task(stop.wait())
    try:
        acquire = asyncio.create_task(lease.acquire())
        await _first_of(acquire, stopped)
        if not acquire.done():
            await _cancel(acquire)
            return EXIT_OK
        health.lead(is_leader=True)
        hold = asyncio.create_task(lease.hold())
        work = asyncio.create_task(_work(api, settings, health, record))
        await _first_of(hold, work, stopped)
        health.lead(is_leader=False)
        is_lost = hold.done()
        await _cancel(work)
        if is_lost:
            logger.error("The process ends: %s", hold.exception())
            return EXIT_LEASE_LOST
        await _cancel(hold)
        await lease.release()
        return EXIT_OK
    finally:
        await _cancel(stopped)
        await asyncio.gather(api.close(), lease_api.close())


async def _work(api: Api, settings: Settings, health: Health, record: Recorder) -> None:
    """Watch and reconcile until cancelled."""
    controller = Controller(api, settings, health)
    survey: Survey | None = None
    background: list[asyncio.Task[None]] = []
    if controller.tenancy is not None:
        survey = Survey(
            api,
            controller.fleet,
            settings,
            [controller.tenancy.look_soon, controller.fleet_changed],
        )
    else:
        logger.info("Serving named namespaces only: no tenants, and capacity is not seen")
    await _first_listing(controller, survey)
    if survey is not None and controller.tenancy is not None:
        background = [
            asyncio.create_task(survey.run()),
            asyncio.create_task(controller.tenancy.run()),
        ]
    # What comes after this look has to be watched by a new start of kopf.
    await _has_new_kinds(controller)
    lists = Lists()
    watcher = Watcher(controller.notice, lists.add, settings, record)
    watcher.start()
    probing = asyncio.create_task(_probe(controller))
    discovering = asyncio.create_task(_rediscover(controller, watcher, settings))
    try:
        await _list_again(controller, lists, settings)
    finally:
        for task in (*background, probing, discovering):
            await _cancel(task)
        await asyncio.gather(watcher.stop(), controller.queue.close(GRACE_SECONDS))


class Lists:
    """Lists that kopf began, and that ours have to follow."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._has_some = asyncio.Event()

    def add(self, *paths: str) -> None:
        """Must be called in the event loop."""
        self._paths.update(paths)
        self._has_some.set()

    async def take(self, seconds: float) -> set[str]:
        """All there are, as soon as there is one; none after so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_some.wait(), max(0.0, seconds))
        taken, self._paths = self._paths, set()
        self._has_some.clear()
        return taken


async def _list_again(controller: Controller, lists: Lists, settings: Settings) -> None:
    """List after kopf, and everything from time to time, until cancelled."""
    due = time.monotonic() + settings.resync_seconds
    while True:
        paths = await lists.take(due - time.monotonic())
        try:
            if paths:
                await controller.list_again(paths)
            else:
                await controller.resync()
                due = time.monotonic() + settings.resync_seconds
        except ApiError as error:
            logger.warning("Could not list again: %s", error)
            await asyncio.sleep(START_AGAIN_SECONDS)
            lists.add(*paths)


async def _probe(controller: Controller) -> None:
    """Ask the workers until cancelled: without it everything else still works."""
    while True:
        try:
            await controller.prober.run()
        except Exception:
            logger.exception("Asking the workers failed and starts again")
        await asyncio.sleep(START_AGAIN_SECONDS)


async def _rediscover(controller: Controller, watcher: Watcher, settings: Settings) -> None:
    """Notice CRDs of others that come or change, until cancelled."""
    while True:
        await asyncio.sleep(min(REDISCOVER_SECONDS, settings.resync_seconds))
        if await _has_new_kinds(controller):
            watcher.restart()


async def _has_new_kinds(controller: Controller) -> bool:
    try:
        return await controller.cluster.rediscover()
    except ApiError as error:
        logger.warning("Could not look which kinds there are: %s", error)
        return False


async def _first_listing(controller: Controller, survey: Survey | None) -> None:
    while True:
        try:
            if survey is not None:
                await survey.list_once()
            await controller.resync()
        except ApiError as error:
            logger.warning(
                "Cannot list what is to be served (is the CRD installed, and the role bound?): %s",
                error,
            )
            await asyncio.sleep(START_AGAIN_SECONDS)
        else:
            return


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _cancel(task: asyncio.Task[Any]) -> None:
    """End a task; an error it ended with before is raised here."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


if __name__ == "__main__":
    sys.exit(main())
