"""`litellm`, by its providers for vLLM and OpenAI, and for the other dialects."""

from __future__ import annotations

import litellm
from checks import CAPITAL, COUNT, KEY, MODEL, URL, check, raises, run

litellm.suppress_debug_info = True
litellm.telemetry = False
OPENAI = {"api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0, "timeout": 120}
ROOT = {**OPENAI, "api_base": URL}


def ask(text: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 60, **fields}


def check_answer(answer) -> None:
    [choice] = answer.choices
    assert "Paris" in choice.message.content and choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens and answer.usage.prompt_tokens > 10


def check_stream(model: str, connection: dict) -> None:
    whole = litellm.completion(model=model, **ask(COUNT), **connection)
    chunks = list(litellm.completion(model=model, **ask(COUNT), **connection, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 5
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason
    assert built.usage.completion_tokens == whole.usage.completion_tokens


@check
def as_vllm():
    check_answer(litellm.completion(model=f"hosted_vllm/{MODEL}", **ask(CAPITAL), **OPENAI))
    check_stream(f"hosted_vllm/{MODEL}", OPENAI)


@check
def as_openai():
    check_answer(litellm.completion(model=f"openai/{MODEL}", **ask(CAPITAL), **OPENAI))
    check_stream(f"openai/{MODEL}", OPENAI)


@check
def as_anthropic():
    check_answer(litellm.completion(model=f"anthropic/{MODEL}", **ask(CAPITAL), **ROOT))
    check_stream(f"anthropic/{MODEL}", ROOT)


@check
def as_ollama():
    check_answer(litellm.completion(model=f"ollama_chat/{MODEL}", **ask(CAPITAL), **ROOT))
    check_stream(f"ollama_chat/{MODEL}", ROOT)


@check
def text_completion():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="one, two, three,", temperature=0, max_tokens=8, **OPENAI
    )
    assert "four" in answer.choices[0].text and answer.choices[0].finish_reason == "length"


@check
async def asynchronously():
    check_answer(await litellm.acompletion(model=f"hosted_vllm/{MODEL}", **ask(CAPITAL), **OPENAI))


@check
def errors():
    raises(litellm.NotFoundError, litellm.completion, model="hosted_vllm/other", **ask("x"), **OPENAI)
    error = raises(litellm.BadRequestError, litellm.completion, model=f"hosted_vllm/{MODEL}", **ask("x", top_p=5), **OPENAI)
    assert "top_p" in str(error)
    raises(litellm.AuthenticationError, litellm.completion, model=f"hosted_vllm/{MODEL}", **ask("x"), **{**OPENAI, "api_key": "wrong"})
    raises(litellm.NotFoundError, litellm.completion, model="anthropic/other", **ask("x"), **ROOT)


run("litellm")
