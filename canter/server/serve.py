"""Run the server: listen first, load the model behind it, serve, and stop in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from canter.client.launch import ENGINE_COMMAND, EngineLaunch
from canter.client.remote import RemoteClient
from canter.client.shared import SharedClient
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, ConfigError, EngineDeadError, EngineNotReadyError
from canter.core.logging import configure_logging, get_logger
from canter.server.accepting import SharedAcceptor
from canter.server.app import build_app
from canter.server.args import ServerArgs
from canter.server.fleet import STATS_SECONDS, restart_policy, run_fleet
from canter.server.http_protocol import BoundedHttpProtocol
from canter.server.listening import BACKLOG, file_identity, listen
from canter.server.load import load_engine
from canter.server.loop_lag import watch_loop
from canter.server.metrics import Metrics, StatsLog
from canter.server.state import ServerState
from canter.server.tls import FileVersions, file_versions, make_context
from canter.server.tracing import Observers, Tracing

logger = get_logger(__name__)

HANDSHAKE_SECONDS = 30.0
"""A client that has connected and says nothing is cut off. It holds up nobody meanwhile: handshakes go on beside each other."""
REFRESH_SECONDS = 5.0
DEATH_GRACE_SECONDS = 5
"""Time for requests to be told that the engine has died, before the server ends too."""


def run_server(
    args: EngineArgs, server: ServerArgs, *, engine_command: Sequence[str] = ENGINE_COMMAND, launch: EngineLaunch | None = None
) -> int:
    """Serve until a signal or the engine's death. Returns the process's exit code: 0 after a signal, 1 after a failure.

    A second signal ends it at once, with 128 + its number. `engine_command` is what runs as the engine; `launch`, the
    caller's, one that has been started with it already.
    """
    configure_logging()
    try:
        args.verify()
        server.verify()
        if server.enable_per_request_metrics and args.disable_log_stats:
            raise ConfigError("enable_per_request_metrics tells what disable_log_stats keeps from being told. Leave one of them out.")
        context = make_context(server)
        tracing = make_tracing(args, server) if server.api_server_count == 1 else None
        listener = listen(server)
    except (ConfigError, OSError) as error:
        return _fail(error)
    socket_file = file_identity(server.uds)
    loop_factory = uvicorn.Config(app="", log_config=None).get_loop_factory()
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            if server.api_server_count > 1:
                failure = runner.run(run_fleet(args, server, listener, engine_command, launch))
            else:
                failure = runner.run(_run(args, server, listener, context, tracing, engine_command, launch))
    finally:
        if tracing is not None:
            tracing.shutdown()
        listener.close()
        if server.uds is not None and file_identity(server.uds) == socket_file:  # else it is another server's by now
            os.unlink(server.uds)
    return 0 if failure is None else _fail(failure)


async def _run(
    args: EngineArgs,
    server: ServerArgs,
    listener: socket.socket,
    context: ssl.SSLContext | None,
    tracing: Tracing | None,
    engine_command: Sequence[str],
    launch: EngineLaunch | None,
) -> BaseException | None:
    metrics = Metrics(_model_name(args, server))
    client = RemoteClient(
        args,
        observer=_observer(metrics, tracing),
        command=engine_command,
        launch=launch,
        stall_timeout=server.engine_stall_timeout,
        restarts=restart_policy(server),
    )
    return await _Service(args, server, listener, context, tracing, client, metrics).run()


def run_frontend(args: EngineArgs, server: ServerArgs, listener: socket.socket, address: str, identity: str) -> int:
    """Serve as one of several frontend processes, until the supervisor at `address` says to stop. Returns the exit code."""
    try:
        context = make_context(server)
        tracing = make_tracing(args, server)
    except (ConfigError, OSError) as error:
        return _fail(error)

    async def run() -> BaseException | None:
        metrics = Metrics(_model_name(args, server), has_engine=False)
        client = SharedClient(args, address, identity, observer=_observer(metrics, tracing), stall_timeout=server.engine_stall_timeout)
        failure = await _Service(args, server, listener, context, tracing, client, metrics).run()
        return None if client.failure is not None else failure  # the supervisor says why the engine is gone

    try:
        with asyncio.Runner(loop_factory=uvicorn.Config(app="", log_config=None).get_loop_factory()) as runner:
            failure = runner.run(run())
    finally:
        if tracing is not None:
            tracing.shutdown()
    return 0 if failure is None else _fail(failure)


def _model_name(args: EngineArgs, server: ServerArgs) -> str:
    return (server.served_model_name or [args.model])[0]


def _observer(metrics: Metrics, tracing: Tracing | None) -> Metrics | Observers:
    return metrics if tracing is None else Observers(metrics, tracing)


def make_tracing(args: EngineArgs, server: ServerArgs) -> Tracing | None:
    if server.otlp_traces_endpoint is None:
        return None
    return Tracing(server.otlp_traces_endpoint, _model_name(args, server))


def _fail(error: BaseException) -> int:
    """The last line of a start that failed: one sentence that says why."""
    message = str(error) or type(error).__name__
    print(f"canter: error: {message}", file=sys.stderr, flush=True)
    return 1


class _Server(uvicorn.Server):
    """uvicorn, with the signals and the acceptance of connections left to us."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None, is_shared: bool) -> None:
        super().__init__(config)
        self._context = context
        self._is_shared = is_shared
        self._listeners: list[socket.socket] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on the sockets."""
        await self.lifespan.startup()
        self._listeners = list(sockets or ())
        self.servers = await self._accept()
        self.started = True

    async def renew(self, context: ssl.SSLContext) -> None:
        """Shake hands with this context from now on. Connections that stand keep theirs."""
        self._context = context
        before, self.servers = self.servers, await self._accept()
        for server in before:
            server.close()

    async def _accept(self) -> list[Any]:
        loop = asyncio.get_running_loop()
        seconds = None if self._context is None else HANDSHAKE_SECONDS
        if self._is_shared:
            return [SharedAcceptor(listener, self._protocol, self._context, seconds) for listener in self._listeners]
        # On copies: a server closes its socket with itself, and another is to go on with it.
        copies = [listener.dup() for listener in self._listeners]
        return [
            await loop.create_server(self._protocol, sock=copy, ssl=self._context, backlog=BACKLOG, ssl_handshake_timeout=seconds)
            for copy in copies
        ]

    def _protocol(self) -> asyncio.Protocol:
        return BoundedHttpProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class _Service:
    """One run: HTTP server, engine process, and what watches them."""

    def __init__(
        self,
        args: EngineArgs,
        server: ServerArgs,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        tracing: Tracing | None,
        client: RemoteClient | SharedClient,
        metrics: Metrics,
    ) -> None:
        self._args = args
        self._server_args = server
        self._listener = listener
        self._metrics = metrics
        self._client = client
        fellows = client if isinstance(client, SharedClient) else None
        app = build_app(client, None, engine_args=args, server_args=server, metrics=metrics, tracing=tracing, fellows=fellows)
        self._is_alone = fellows is None
        self._state: ServerState = app.state.server
        self._http = _Server(_uvicorn_config(app, server), context, not self._is_alone)
        self._stop = asyncio.Event()
        if fellows is not None:
            fellows.answers["stop"] = self._stop.set
        self._failure: BaseException | None = None
        self._signals = 0

    async def run(self) -> BaseException | None:
        """Serve to the end. Returns why, unless a signal asked for it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        engine = asyncio.create_task(self._run_engine())
        stop = asyncio.create_task(self._stop.wait())
        helpers = [
            asyncio.create_task(self._log_stats()),
            asyncio.create_task(self._watch_certificates()),
            asyncio.create_task(watch_loop(self._metrics.loop_lag)),
        ]
        await asyncio.wait((http, engine, stop), return_when=asyncio.FIRST_COMPLETED)
        await self._wind_down(http, engine)
        for task in (stop, *helpers):
            task.cancel()
        await asyncio.gather(stop, *helpers, return_exceptions=True)
        return self._failure

    async def _run_engine(self) -> None:
        """Load, serve, and return when the engine can't go on; the reason is kept for the end."""
        try:
            await load_engine(self._client, self._state)
            await self._client.wait_dead()
            if not self._stop.is_set():
                raise EngineDeadError("The engine has died; its last lines above say why.")
        except (CanterError, OSError) as error:
            if not self._stop.is_set():
                self._failure = error

    async def _wind_down(self, http: asyncio.Task[None], engine: asyncio.Task[None]) -> None:
        """Take no more work, let requests end, then stop the engine."""
        self._state.draining = self._stop.is_set()
        is_paused = self._state.traffic.is_paused  # then nothing would come of waiting
        self._state.traffic.turn_away(EngineNotReadyError("The server is stopping. Send the request to another one."))
        self._stop.set()
        self._http.should_exit = True
        timeout = DEATH_GRACE_SECONDS if self._failure else 0 if is_paused else self._server_args.shutdown_timeout
        if self._client.num_live and timeout:
            logger.info("stopping: %d requests may go on for up to %g s", self._client.num_live, timeout)
        if not await self._client.wait_idle(timeout):
            logger.info("stopping: %d requests end with an error", self._client.num_live)
            self._client.fail_all(EngineDeadError("The server is shutting down; the request was not finished."))
        await self._end_http(http)
        await self._client.shutdown()
        await engine

    async def _end_http(self, http: asyncio.Task[None]) -> None:
        """Connections that still send, or don't read, can't hold the server up."""
        done, _ = await asyncio.wait((http,), timeout=DEATH_GRACE_SECONDS)
        if not done:
            self._http.force_exit = True
            await asyncio.wait((http,), timeout=1.0)
            http.cancel()
        await asyncio.gather(http, return_exceptions=True)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            logger.warning("second signal: ending at once")
            self._client.kill()
            os._exit(128 + number)
        logger.info("received %s: stopping", signal.Signals(number).name)
        self._stop.set()

    async def _log_stats(self) -> None:
        if self._args.disable_log_stats or not self._is_alone:
            return
        log = StatsLog(self._metrics)
        while True:
            await asyncio.sleep(STATS_SECONDS)
            log.write()

    async def _watch_certificates(self) -> None:
        """Take renewed files as soon as they fit together; until then the old ones serve on."""
        if not self._server_args.enable_ssl_refresh:
            return
        known: FileVersions | None = None
        with contextlib.suppress(OSError):  # gone since they were read: found missing below, until they are back
            known = file_versions(self._server_args)
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                seen = file_versions(self._server_args)
                context = make_context(self._server_args) if seen != known else None
            except (ConfigError, OSError) as error:
                logger.warning("the old certificate stays in use: %s", error)
                continue
            known = seen
            if context is not None:
                await self._http.renew(context)
                logger.info("the certificate was read again")


def _uvicorn_config(app: object, server: ServerArgs) -> uvicorn.Config:
    _configure_uvicorn_logging(server)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,  # `AccessLog` knows more
        lifespan="off",
        ws="none",
        http=BoundedHttpProtocol,
        root_path=server.root_path,
        server_header=False,
        timeout_keep_alive=5,
    )


def _configure_uvicorn_logging(server: ServerArgs) -> None:
    """uvicorn's lines go where ours go, in the same form."""
    ours = logging.getLogger("canter")
    logger = logging.getLogger("uvicorn")
    logger.handlers = list(ours.handlers)
    logger.propagate = False
    logger.setLevel(5 if server.uvicorn_log_level == "trace" else server.uvicorn_log_level.upper())
