"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from canter.core.errors import ModelNotFoundError
from canter.server.schemas.openai import ModelCard, ModelList, ModelPermission
from canter.server.state import ServerState, server_state


async def list_models(request: Request) -> Response:
    """A card for each name of the model. While it loads, `max_model_len` is null."""
    state = server_state(request)
    return _json(ModelList([_card(state, name) for name in state.model_names]))


async def get_model(request: Request) -> Response:
    """The card of one name; hub names hold a slash, so the whole rest of the path is the name."""
    state = server_state(request)
    name = request.path_params["model"]
    if not name:
        raise ModelNotFoundError("The path ends where the name of a model should stand.")
    return _json(_card(state, state.model_name(name)))


def _card(state: ServerState, name: str) -> ModelCard:
    info = state.client.info
    context = None if info is None else info.max_model_len
    permission = ModelPermission(f"modelperm-{name}", state.created)
    return ModelCard(name, state.created, state.engine_args.model, context, permission=[permission])


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
