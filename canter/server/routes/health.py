"""What load balancers and people ask of a server: `/health`, `/ping`, `/version`, `/metrics`."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from canter.core.errors import EngineDeadError, EngineError, EngineNotReadyError, EngineRestartingError
from canter.server.errors import LOADING_RETRY_SECONDS, sanitise
from canter.server.sse import encoder
from canter.server.state import ServerState, server_state
from canter.version import __version__

_PREFIX = re.compile(rb"^((?:# (?:HELP|TYPE) )?)vllm:", re.MULTILINE)


async def health(request: Request) -> Response:
    """200 with no body when requests are served; else 503 and a status: loading, restarting, stuck, stopping or dead."""
    state = server_state(request)
    status = _status(state)
    if status is None:
        return Response()
    headers = {"Retry-After": str(LOADING_RETRY_SECONDS)} if status["status"] in ("loading", "restarting") else None
    return Response(encoder.encode(status), 503, headers, "application/json")


def _status(state: ServerState) -> dict[str, object] | None:
    """What keeps the server from serving, or None."""
    if state.draining:
        return {"status": "stopping"}
    try:
        state.client.check_health()
    except EngineRestartingError:
        return {"status": "restarting", "phases": state.client.phases}
    except EngineNotReadyError:
        return {"status": "loading", "phases": state.client.phases}
    except EngineDeadError as error:
        return {"status": "dead", "message": sanitise(str(error))}
    except EngineError as error:
        if not state.traffic.is_paused:  # else it does as it was told
            return {"status": "stuck", "message": sanitise(str(error))}
    return {"status": "loading", "phases": state.client.phases} if state.text is None else None


async def version(request: Request) -> Response:
    """Canter's version."""
    return Response(encoder.encode({"version": __version__}), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Prometheus' text format, names as `--metrics-prefix` has them."""
    state = server_state(request)
    if state.fellows is None:
        body, content_type = state.metrics.expose()
    else:
        body, content_type = await state.fellows.ask_exchange("metrics")
    prefix = state.server_args.metrics_prefix
    if prefix != "vllm":
        body = _PREFIX.sub(rb"\1" + prefix.encode() + b":", body)
    return Response(body, headers={"content-type": content_type})
