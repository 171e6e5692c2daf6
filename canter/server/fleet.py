"""Several frontend processes on one port: the parent that hosts their engine, keeps them alive, adds up their figures and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from canter.client.exchange import Exchange, Member
from canter.client.launch import EngineLaunch
from canter.client.restarts import RestartPolicy
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, EngineDeadError
from canter.core.logging import get_logger
from canter.core.messages import EngineStats
from canter.server.args import ServerArgs
from canter.server.figures import Sum, figures
from canter.server.metrics import EngineFigures, StatsLog, Totals

logger = get_logger(__name__)

FRONTEND_COMMAND = (sys.executable, "-m", "canter.server.frontend")
MAX_FRONTEND_RESTARTS = 10
STATS_SECONDS = 10.0
FIGURES_SECONDS = 2.0
"""A frontend that is killed takes with it what it has counted in at most so long."""
STOP_SECONDS = 15.0
"""Beyond the time that requests may take, for connections to close and processes to end."""


def restart_policy(server: ServerArgs) -> RestartPolicy | None:
    """How an engine that dies is started again."""
    return RestartPolicy(server.max_engine_restarts) if server.on_engine_death == "resume" else None


async def run_fleet(
    args: EngineArgs, server: ServerArgs, listener: socket.socket, engine_command: Sequence[str], launch: EngineLaunch | None
) -> BaseException | None:
    """Serve to the end. Returns why, unless a signal asked for it."""
    return await _Fleet(args, server, listener, engine_command, launch).run()


class _Fleet:
    """One run of a parent."""

    def __init__(
        self, args: EngineArgs, server: ServerArgs, listener: socket.socket, engine_command: Sequence[str], launch: EngineLaunch | None
    ) -> None:
        self._args = args
        self._server_args = server
        self._listener = listener
        self._engine = EngineFigures((server.served_model_name or [args.model])[0])
        self._registry = CollectorRegistry()
        self._registry.register(self._engine)
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self._registry)
        self._exchange = Exchange(
            args, observer=self._engine, command=engine_command, launch=launch, restarts=restart_policy(server), on_stuck=self._on_stuck
        )
        self._exchange.methods.update(metrics=self._metrics, loads=self._loads)
        self._past = Sum()
        self._processes: dict[Member, asyncio.subprocess.Process] = {}
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._signals = 0

    @property
    def stats(self) -> EngineStats:
        """The engine's, for the log."""
        return self._engine.stats

    @property
    def totals(self) -> Totals:
        """Of all frontends, as last told, for the log."""
        total = self._told()
        return Totals(int(total.value("vllm:prompt_tokens_total")), int(total.value("vllm:generation_tokens_total")))

    async def run(self) -> BaseException | None:
        """See `run_fleet`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._exchange.start()
        except OSError as error:
            return error
        logger.info("%d processes speak HTTP", self._server_args.api_server_count)
        keepers = [asyncio.create_task(self._keep(number)) for number in range(self._server_args.api_server_count)]
        helpers = [
            asyncio.create_task(self._watch_engine()),
            asyncio.create_task(self._watch_figures()),
            asyncio.create_task(self._log_stats()),
        ]
        await self._stop.wait()
        await self._wind_down(keepers)
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await self._exchange.shutdown()
        return self._failure

    async def _keep(self, number: int) -> None:
        """See to it that there is a frontend in this place."""
        restarts = RestartPolicy(MAX_FRONTEND_RESTARTS)
        is_first = True
        while not self._stop.is_set():
            try:
                code, was_ready = await self._live()
            except OSError as error:
                self._end(error)
                return
            if self._stop.is_set():
                return
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            logger.error("frontend process %d ended %s", number, how)
            if is_first and not was_ready and code > 0:
                self._end(EngineDeadError("A frontend process could not start; its last lines above say why."))
                return
            is_first = False
            delay = restarts.next_delay(time.monotonic())
            if delay is None:
                self._end(EngineDeadError(f"A frontend process has ended {restarts.num_recent + 1} times; its last lines above say why."))
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay)

    async def _live(self) -> tuple[int, bool]:
        """One life of a frontend: its exit code, and whether it ever served."""
        member = self._exchange.add_member()
        fd = self._listener.fileno()
        process: asyncio.subprocess.Process | None = None
        try:
            # A session of its own keeps a terminal's Ctrl-C from it: this process tells it what to do.
            process = await asyncio.create_subprocess_exec(
                *FRONTEND_COMMAND, stdin=asyncio.subprocess.PIPE, start_new_session=True, pass_fds=(fd,)
            )
            self._processes[member] = process
            start = {
                "address": member.address,
                "identity": member.identity.decode(),
                "listener": fd,
                "engine": asdict(self._args),
                "server": asdict(self._server_args),
            }
            assert process.stdin is not None
            process.stdin.write((json.dumps(start) + "\n").encode())  # stays open: its end tells the frontend that this process is gone
            return await process.wait(), member.is_ready
        finally:
            self._processes.pop(member, None)
            self._exchange.remove_member(member)
            self._past.keep(member.told.get("figures", ()))

    async def _watch_engine(self) -> None:
        try:
            self._engine.info = await self._exchange.host.wait_ready()
            await self._exchange.host.wait_dead()
            raise EngineDeadError("The engine has died; its last lines above say why.")
        except CanterError as error:
            self._end(error)

    async def _watch_figures(self) -> None:
        while True:
            await asyncio.sleep(FIGURES_SECONDS)
            await self._exchange.poll("figures")

    async def _log_stats(self) -> None:
        if self._args.disable_log_stats:
            return
        log = StatsLog(self)
        while True:
            await asyncio.sleep(STATS_SECONDS)
            log.write()

    async def _metrics(self) -> tuple[bytes, str]:
        """The figures of all processes as one text."""
        await self._exchange.poll("figures")
        total = self._told()
        total.add(figures(self._registry))
        return total.expose()

    async def _loads(self) -> list[int]:
        await self._exchange.poll("load")
        return [member.told.get("load", 0) for member in self._exchange.members]

    def _told(self) -> Sum:
        total = self._past.copy()
        for member in self._exchange.members:
            total.add(member.told.get("figures", ()))
        return total

    async def _wind_down(self, keepers: list[asyncio.Task[None]]) -> None:
        """Have every frontend let its requests end, and wait for them; the engine goes last."""
        telling = asyncio.create_task(self._exchange.everywhere("stop", []))
        for member, process in list(self._processes.items()):
            if not member.has_joined:
                _signal(process, signal.SIGTERM)
        limit = STOP_SECONDS + (0 if self._failure else self._server_args.shutdown_timeout)
        _, late = await asyncio.wait(keepers, timeout=min(limit, 365 * 24 * 3600.0))
        if late:
            logger.warning("%d frontend processes have not ended in time", len(late))
            for process in list(self._processes.values()):
                _signal(process, signal.SIGKILL)
        await asyncio.gather(telling, *keepers, return_exceptions=True)

    def _end(self, failure: BaseException) -> None:
        if not self._stop.is_set():
            self._failure = failure
            self._stop.set()

    def _on_stuck(self, member: Member) -> None:
        process = self._processes.get(member)
        if process is not None:
            logger.error("a frontend process does not answer any more and is killed")
            _signal(process, signal.SIGKILL)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            logger.warning("second signal: ending at once")
            for process in self._processes.values():
                _signal(process, signal.SIGKILL)
            self._exchange.kill()
            os._exit(128 + number)
        logger.info("received %s: stopping", signal.Signals(number).name)
        self._stop.set()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
