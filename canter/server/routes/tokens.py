"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from canter.core.errors import InvalidRequestError
from canter.server.body import read_json
from canter.server.generation import Generation, Prompt
from canter.server.routes.chat import chat_prompt
from canter.server.schemas.openai import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from canter.server.sse import json_response
from canter.server.state import server_state


async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a conversation."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, TokenizeRequest, state.server_args.max_body_bytes)
    state.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", "prompt")
    if body.prompt is not None and body.tools:
        raise InvalidRequestError("tools need messages: a prompt is taken as it is.", "tools")

    async def answer() -> TokenizeAnswer:
        prompt = await _prompt(generation, body, state.server_args.trust_request_chat_template)
        strings = await generation.token_strings(prompt.token_ids) if body.return_token_strs else None
        return TokenizeAnswer(len(prompt.token_ids), generation.info.max_model_len, prompt.token_ids, strings)

    return json_response(answer())


async def _prompt(generation: Generation, body: TokenizeRequest, trust_template: bool) -> Prompt:
    if body.prompt is not None:
        return await generation.encode(body.prompt, True if body.add_special_tokens is None else body.add_special_tokens)
    return await chat_prompt(generation, body, trust_template)


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = server_state(request)
    generation = state.generation()
    body = await read_json(request, DetokenizeRequest, state.server_args.max_body_bytes)
    state.model_name(body.model)
    prompt = generation.check_token_ids(body.tokens, "tokens")

    async def answer() -> DetokenizeAnswer:
        return DetokenizeAnswer(await generation.decode(prompt.token_ids))

    return json_response(answer())
