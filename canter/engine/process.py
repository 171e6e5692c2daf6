"""The engine process: `python -m canter.engine`, started by a client.

The client writes one line of JSON to its stdin: {"address": ZMQ address of the client's ROUTER socket, "args":
{engine arguments}, "black_box": descriptor where the engine notes which requests run}. The engine connects a DEALER
socket and sends `LoadPhase` messages, then `Ready` or `Failed`, then serves. It ends on `Shutdown`, and at once when its
stdin closes: then the client is gone. A client that closes it before that line wanted no engine after all.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
from typing import Any

import msgspec
import zmq

from canter.core import messages
from canter.core.black_box import write_running
from canter.core.config import EngineArgs
from canter.core.errors import CanterError, EngineError
from canter.core.lifeline import end_with_parent
from canter.core.logging import configure_logging, get_logger
from canter.core.messages import (
    AbortRequests,
    AddRequest,
    Failed,
    LoadPhase,
    Message,
    Outputs,
    Ready,
    RequestDelta,
    Shutdown,
    Utility,
    UtilityResult,
)
from canter.device import CudaDevice
from canter.engine import lean_torch
from canter.engine.build import build_engine
from canter.engine.core import EngineCore

logger = get_logger(__name__)


class EngineProcess:
    """Moves messages between one client's socket and an `EngineCore`."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        self._core = core
        self._socket = socket
        self._stopping = False

    def run(self) -> None:
        """Serve until `Shutdown`. Blocks in the socket, using no CPU, while there is nothing to do."""
        while not self._stopping:
            self._receive_all(wait=not self._core.has_work())
            if self._core.has_work():
                send(self._socket, Outputs(self._core.step(), self._core.stats()))
        self._core.shutdown()

    def _receive_all(self, wait: bool) -> None:
        flags = 0 if wait else zmq.NOBLOCK
        while True:
            try:
                data = self._socket.recv(flags)
            except zmq.Again:
                return
            self._read(data)
            flags = zmq.NOBLOCK

    def _read(self, data: bytes) -> None:
        """A message that makes no sense must not end the engine, nor leave its sender waiting."""
        try:
            message = messages.decode_frontend(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            logger.exception("a message from the client could not be read")
            fields = msgspec.msgpack.decode(data)
            if fields[0] == AddRequest.__name__:
                self._refuse(fields[1], EngineError("The engine could not read the request."))
            return
        self._handle(message)

    def _handle(self, message: messages.FrontendMessage) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequests():
                self._core.abort(message.request_ids)
            case Utility():
                send(self._socket, self._call(message))
            case Shutdown():
                self._stopping = True

    def _add(self, request: AddRequest) -> None:
        try:
            self._core.add_request(request)
        except CanterError as error:
            self._refuse(request.request_id, error)
        except Exception as error:
            logger.exception("request %r could not be added", request.request_id)
            self._refuse(request.request_id, EngineError(f"The engine could not add the request ({type(error).__name__})."))

    def _refuse(self, request_id: str, error: CanterError) -> None:
        delta = RequestDelta(request_id, [], messages.FINISH_ERROR, error=str(error), error_type=type(error).__name__)
        send(self._socket, Outputs([delta], self._core.stats()))

    def _call(self, call: Utility) -> UtilityResult:
        try:
            return UtilityResult(call.call_id, self._core.utility(call.method, call.args))
        except CanterError as error:
            return UtilityResult(call.call_id, error=str(error))
        except Exception as error:  # wrong arguments, most likely
            logger.exception("%s failed", call.method)
            return UtilityResult(call.call_id, error=f"{call.method} failed: {type(error).__name__}.")


def send(socket: zmq.Socket[bytes], message: Message) -> None:
    socket.send(messages.encode(message))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the client, which stops this process
    configure_logging("engine")
    import_seconds = _seconds_since_process_start()
    line = sys.stdin.readline()
    if not line:
        return 0
    start = json.loads(line)
    end_with_parent()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(start["address"])
    try:
        return _load_and_serve(socket, start["args"], start["black_box"], import_seconds)
    finally:
        gc.unfreeze()  # the interpreter's end clears away what is in cycles, and finds nothing frozen
        socket.close(linger=2000)
        context.term()


def _load_and_serve(socket: zmq.Socket[bytes], arguments: dict[str, Any], black_box: int, import_seconds: float) -> int:
    def on_phase(name: str, seconds: float) -> None:
        send(socket, LoadPhase(name, seconds))

    on_phase("import", import_seconds)
    if arguments["logits_processors"] or CudaDevice.is_available():
        lean_torch.complete()
    try:
        core = build_engine(EngineArgs.parse(**arguments), on_phase)
    except (CanterError, OSError, MemoryError) as error:
        logger.error("start failed: %s", error)
        send(socket, Failed(str(error) or type(error).__name__, user_error=True))
        return 1
    except Exception as error:
        logger.exception("start failed")
        send(socket, Failed(f"The engine could not start: {type(error).__name__}: {error}"))
        return 1
    gc.freeze()  # the model and the modules stay: a collection has no need to look at them
    gc.enable()
    write_running(black_box, [])
    core.on_new_rows = functools.partial(write_running, black_box)
    send(socket, Ready(core.info))
    try:
        EngineProcess(core, socket).run()
    except Exception as error:
        logger.exception("the engine stopped")
        send(socket, Failed(f"The engine stopped: {type(error).__name__}."))
        return 1
    return 0


def _seconds_since_process_start() -> float:
    """Seconds since the kernel started this process: interpreter and imports."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime", encoding="ascii") as uptime:
        return max(0.0, float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
