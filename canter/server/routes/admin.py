"""Routes that show and control a server. None of them is there unless a flag asks for it; see `routes`."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from canter.client.exchange import CLOSE_GATE, OPEN_GATE
from canter.core.errors import ConflictError, InvalidRequestError
from canter.server.args import ServerArgs
from canter.server.body import parse, read_body
from canter.server.sse import encoder, json_response
from canter.server.state import server_state
from canter.version import __version__

T = TypeVar("T", bound=msgspec.Struct)

MAX_PROFILE_STEPS = 1_000_000
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def routes(args: ServerArgs) -> list[Route]:
    """Those that the flags ask for."""
    found: list[Route] = []
    if args.enable_server_load_tracking:
        found.append(Route("/load", load, methods=["GET"]))
    if args.enable_tokenizer_info_endpoint:
        found.append(Route("/tokenizer_info", tokenizer_info, methods=["GET"]))
    if args.profile_dir is not None:
        found += [Route("/start_profile", start_profile, methods=["POST"]), Route("/stop_profile", stop_profile, methods=["POST"])]
    if args.enable_dev_mode:
        found += [
            Route("/server_info", server_info, methods=["GET"]),
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/pause", pause, methods=["POST"]),
            Route("/resume", resume, methods=["POST"]),
            Route("/is_paused", is_paused, methods=["GET"]),
            Route("/abort_requests", abort_requests, methods=["POST"]),
        ]
    return found


def _json(body: object) -> Response:
    return Response(encoder.encode(body), media_type="application/json")


async def load(request: Request) -> Response:
    """Requests that are being answered now; monitoring and this route don't count."""
    state = server_state(request)
    loads = await state.everywhere("load") if state.fellows is None else await state.fellows.ask_exchange("loads")
    return _json({"server_load": sum(loads)})


async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's configuration, as its files have it, and the chat template in use."""
    state = server_state(request)
    generation = state.generation()
    tokenizer = generation.text.tokenizer
    return _json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": generation.info.max_model_len,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "unk_token": tokenizer.unk_token,
            "pad_token": tokenizer.pad_token,
            "added_tokens_decoder": {
                str(i): {"content": tokenizer.id_to_token(i), "special": i in tokenizer.special_token_ids}
                for i in sorted(tokenizer.added_token_ids)
            },
            "chat_template": generation.text.chat_template.source,
        }
    )


async def server_info(request: Request) -> Response:
    """The arguments, without secrets, and what the engine made of them. `config_format`: text or json."""
    state = server_state(request)
    form = request.query_params.get("config_format", "text")
    if form not in ("text", "json"):
        raise InvalidRequestError(f"config_format must be text or json, got {form!r:.80}.", "config_format")
    shown = dataclasses.asdict(state.server_args)
    shown["api_key"] = ["…"] * len(state.server_args.api_keys)
    parts: dict[str, Any] = {"engine_args": dataclasses.asdict(state.engine_args), "server_args": shown}
    if form == "text":
        parts = {name: ", ".join(f"{key}={value!r}" for key, value in part.items()) for name, part in parts.items()}
    return _json({"version": __version__, **parts, "engine": state.client.info})


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prefixes. False while requests hold parts of the cache."""
    state = server_state(request)
    for name in ("reset_running_requests", "reset_external"):
        if request.query_params.get(name, "false").lower() not in ("false", "0", ""):
            raise InvalidRequestError(f"{name} is not supported by this server. Leave it out.", name)

    async def answer() -> dict[str, bool]:
        return {"success": bool(await state.client.utility("reset_prefix_cache"))}

    return json_response(answer())


async def pause(request: Request) -> Response:
    """Stop the engine between two steps. `mode`: abort what is under way, wait for it, or keep it as it is until `/resume`.

    Requests that come meanwhile wait. `clear_cache` (true) then forgets cached prefixes, unless requests are kept.
    """
    state = server_state(request)
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise InvalidRequestError(f"mode must be abort, wait or keep, got {mode!r:.80}.", "mode")
    clear = request.query_params.get("clear_cache", "true").lower()
    if clear not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"clear_cache must be true or false, got {clear!r:.80}.", "clear_cache")
    state.generation()

    async def answer() -> dict[str, str]:
        await state.everywhere(CLOSE_GATE)
        if mode == "abort":
            await state.everywhere("abort")
        if mode != "keep":
            await state.everywhere("wait_idle")
        if not state.traffic.is_paused:
            return {"status": "resumed"}  # by another, while this one waited
        await state.client.utility("pause")
        if mode != "keep" and clear in ("true", "1"):
            await state.client.utility("reset_prefix_cache")
        return {"status": "paused"}

    return json_response(answer())


async def resume(request: Request) -> Response:
    """Go on with what was kept, and let in what waited."""
    state = server_state(request)

    async def answer() -> dict[str, str]:
        await state.client.utility("resume")
        await state.everywhere(OPEN_GATE)
        return {"status": "resumed"}

    return json_response(answer())


async def is_paused(request: Request) -> Response:
    """Whether the engine is paused, or about to be."""
    return _json({"is_paused": server_state(request).traffic.is_paused})


class AbortBody(msgspec.Struct):
    """`POST /abort_requests`."""

    request_ids: list[str] | None = None


async def abort_requests(request: Request) -> Response:
    """End requests by the ids in their answers; without ids, all. Their streams end with finish_reason abort."""
    state = server_state(request)
    body = await _small_body(request, AbortBody)

    async def answer() -> dict[str, int]:
        return {"aborted": sum(await state.everywhere("abort", body.request_ids))}

    return json_response(answer())


class ProfileBody(msgspec.Struct):
    """`POST /start_profile`."""

    profile_prefix: str = "canter"
    delay_iterations: int = 0
    max_iterations: int = 0


async def start_profile(request: Request) -> Response:
    """Begin to record the engine's steps. 409 when that is so already."""
    state = server_state(request)
    body = await _small_body(request, ProfileBody)
    if not _PREFIX.fullmatch(body.profile_prefix):
        raise InvalidRequestError(
            "profile_prefix must be 1 to 128 letters, digits, '.', '_' or '-', and begin with a letter or digit.", "profile_prefix"
        )
    for name in ("delay_iterations", "max_iterations"):
        if not 0 <= getattr(body, name) <= MAX_PROFILE_STEPS:
            raise InvalidRequestError(f"{name} must be at least 0 and at most {MAX_PROFILE_STEPS}, got {getattr(body, name)}.", name)
    folder = state.server_args.profile_dir or ""
    name = f"{body.profile_prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.trace.json"
    path = os.path.abspath(os.path.join(folder, name))

    async def answer() -> dict[str, str]:
        if not await state.client.utility("start_profile", path, body.delay_iterations, body.max_iterations):
            raise ConflictError("A profile is being recorded already. End it with /stop_profile.")
        return {"trace": path}

    return json_response(answer())


async def stop_profile(request: Request) -> Response:
    """End the recording and write it: a trace for Perfetto or chrome://tracing. 409 when there is none."""
    state = server_state(request)

    async def answer() -> dict[str, str]:
        path = await state.client.utility("stop_profile")
        if path is None:
            raise ConflictError("No profile is being recorded. Begin one with /start_profile.")
        return {"trace": path}

    return json_response(answer())


async def _small_body(request: Request, kind: type[T]) -> T:
    """A body that may be missing, and whose unknown fields are refused: nobody's client sends private ones here."""
    data = await read_body(request, 64 * 1024) or b"{}"
    body = parse(data, kind)
    for name in msgspec.json.decode(data, type=dict[str, msgspec.Raw]):
        if name not in kind.__struct_fields__:
            raise InvalidRequestError(f"{name!r:.80} is no field of this route.", f"{name:.80}")
    return body
