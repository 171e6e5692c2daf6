"""The main job: the bundled chat model behind HTTP, spoken to by the `openai` client."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time

import httpx
import openai
import pytest

from canter import LLM, SamplingParams
from tests.e2e.conftest import Server, answers, serve, wait_for
from tests.weights import PROMPTS

pytestmark = pytest.mark.real


@pytest.fixture
def client(bundled_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bundled_server.url}/v1", api_key="unused", max_retries=0, timeout=120)


def test_chat_answers_sensibly(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    answer = client.chat.completions.create(model="smol", messages=question, temperature=0, max_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    arguments = dict(model="smol", messages=[{"role": "user", "content": "Count from one to ten in words."}], temperature=0, max_tokens=60)
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 10


def request_options(i: int) -> dict[str, object]:
    """Greedy and seeded requests of several kinds."""
    kinds = [
        dict(temperature=0),
        dict(temperature=0.8, top_p=0.9),
        dict(temperature=1.0, top_k=40),
        dict(temperature=0.7, repetition_penalty=1.2),
    ]
    return {**kinds[i % len(kinds)], "seed": 1000 + i, "max_tokens": 8 + i % 17}


def test_the_same_64_requests_over_http_and_offline(bundled_server: Server) -> None:
    """All at once, one by one, streamed and not, over HTTP and through `LLM`: the same text."""
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} ({i})" for i in range(64)]

    async def ask(client: openai.AsyncOpenAI, i: int, stream: bool) -> str:
        options = request_options(i)
        extra = {k: options.pop(k) for k in ("top_k", "repetition_penalty") if k in options}
        answer = await client.completions.create(model="smol", prompt=prompts[i], stream=stream, extra_body=extra, **options)
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all(stream: bool) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{bundled_server.url}/v1", api_key="unused", max_retries=0, timeout=300) as client:
            return await asyncio.gather(*(ask(client, i, stream) for i in range(64)))

    async def ask_in_turn() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{bundled_server.url}/v1", api_key="unused", max_retries=0, timeout=300) as client:
            return [await ask(client, i, False) for i in range(0, 64, 4)]

    whole, streamed, in_turn = asyncio.run(ask_all(False)), asyncio.run(ask_all(True)), asyncio.run(ask_in_turn())
    with LLM(max_model_len=2048, kv_cache_memory_bytes=2**30) as llm:
        assert llm.info.eager_reason is None  # what was served ran as step programs, and so does this
        offline = llm.generate(prompts, [SamplingParams(**request_options(i)) for i in range(64)], use_tqdm=False)
    assert whole == streamed
    assert whole[::4] == in_turn
    assert whole == [output.outputs[0].text for output in offline]
    bundled_server.wait_idle()


@pytest.mark.slow
def test_500_requests_a_fifth_of_which_hang_up(bundled_server: Server) -> None:
    rng = random.Random(5)
    server = bundled_server

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore, i: int) -> str:
        words = " ".join(rng.choice(PROMPTS).split()[:3] * rng.randint(1, 40))
        body = {
            "model": "smol",
            "prompt": f"{i} {words}",
            "max_tokens": rng.randint(1, 64),
            "stream": True,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        leaves_after = rng.randint(0, 3) if i % 5 == 0 else None
        async with gate, client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            seen, done = 0, False
            async for line in response.aiter_lines():
                if leaves_after is not None and seen >= leaves_after:
                    return "left"
                seen += line.startswith("data:")
                done = done or line == "data: [DONE]"
            assert done, f"request {i} ended without [DONE]"
            return "done"

    async def everyone() -> list[str]:
        gate = asyncio.Semaphore(64)
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            return await asyncio.gather(*(one(client, gate, i) for i in range(500)))

    outcomes = asyncio.run(everyone())
    assert outcomes.count("done") >= 400
    server.wait_idle()


def test_a_client_that_leaves_before_the_first_token_frees_its_memory(bundled_server: Server) -> None:
    body = {"model": "smol", "prompt": "word " * 1800, "max_tokens": 100}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{bundled_server.url}/v1/completions", json=body, timeout=0.05)
    bundled_server.wait_idle()


def test_health_answers_while_loading_and_sigterm_drains() -> None:
    with serve(
        "--max-model-len", "1024", "--kv-cache-memory-bytes", "256M", "--served-model-name", "smol", "--shutdown-timeout", "30", ready=False
    ) as server:
        wait_for(lambda: is_loading(server), 30, "the loading server to answer")
        assert httpx.get(f"{server.url}/metrics", timeout=5).status_code == 200
        wait_for(lambda: answers(server), 60, "the server to be ready")
        body = {"model": "smol", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        # A piece may hold several tokens: those of a reader that is slow for a moment are merged.
        *pieces, usage, done = rest
        assert done == "data: [DONE]"
        assert json.loads(usage[6:])["usage"]["completion_tokens"] == 200, "the stream was meant to be finished before the server went"
        assert json.loads(pieces[-1][6:])["choices"][0]["finish_reason"] == "length"
        server.process.wait(30)
        assert server.process.returncode == 0


def is_loading(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 503
    except httpx.HTTPError:
        time.sleep(0.01)
        return False
