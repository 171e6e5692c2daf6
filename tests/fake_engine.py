"""An engine process without a model: speaks the protocol of `canter.engine.process` and echoes prompts.

--fail MESSAGE   can't start; MESSAGE is the user's mistake
--crash          dies while it loads, without a word
--hold           loads for ever
--die-after N    dies after N steps
--poison CHAR    dies in the step after one in which a request ran whose prompt begins with this character
--loads-once F   dies while it loads when the file F is there, and makes it
--delay S        seconds between steps
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import zmq

from canter.core import messages
from canter.core.black_box import write_running
from canter.core.errors import CanterError
from tests.fake_core import FakeCore


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--die-after", type=int, default=-1)
    parser.add_argument("--poison", type=ord)
    parser.add_argument("--loads-once", type=Path)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    start = json.loads(sys.stdin.readline())
    threading.Thread(target=exit_with_client, daemon=True).start()
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(start["address"])

    def send(message: messages.Message) -> None:
        socket.send(messages.encode(message))

    send(messages.LoadPhase("weights", 0.25))
    if options.loads_once is not None:
        options.crash = options.loads_once.exists()
        options.loads_once.touch()
    if options.crash:
        os._exit(3)
    if options.fail:
        send(messages.Failed(options.fail, user_error=True))
        socket.close(linger=1000)
        return 1
    while options.hold:
        time.sleep(1)
    core = FakeCore()
    send(messages.Ready(core.info))
    steps, poisons = 0, list[int]()
    write_running(start["black_box"], [])
    while True:
        while not core.has_work() or socket.poll(0):
            message = messages.decode_frontend(socket.recv())
            if isinstance(message, messages.Shutdown):
                return 0
            handle(core, message, send)
        write_running(start["black_box"], core.requests)
        if steps == options.die_after or options.poison in poisons:
            os._exit(4)
        poisons = [request.prompt_token_ids[0] for request in core.requests.values()]
        steps += 1
        time.sleep(options.delay)
        send(messages.Outputs(core.step(), core.stats()))


def handle(core: FakeCore, message: messages.FrontendMessage, send) -> None:
    match message:
        case messages.AddRequest():
            core.add_request(message)
        case messages.AbortRequests():
            core.abort(message.request_ids)
        case messages.Utility() if message.method == "aborted":
            send(messages.UtilityResult(message.call_id, core.aborted))
        case messages.Utility():
            try:
                send(messages.UtilityResult(message.call_id, core.utility(message.method, message.args)))
            except CanterError as error:
                send(messages.UtilityResult(message.call_id, error=str(error)))


def exit_with_client() -> None:
    while os.read(0, 1 << 16):  # not sys.stdin: its lock, held here, would spoil the interpreter's own exit
        continue
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
