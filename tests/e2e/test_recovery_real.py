"""The bundled model behind HTTP, whose engine is killed in the middle of its work."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import Server, answers, serve, wait_for
from tests.weights import PROMPTS

pytestmark = [pytest.mark.real, pytest.mark.slow]

FLAGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "512M", "--served-model-name", "smol", "--shutdown-timeout", "60")
NUM_STREAMS = 32


def options(i: int) -> dict[str, object]:
    """Greedy and seeded, with what an engine must remember of the output: penalties, minimum, bans, logprobs, several choices."""
    kinds: list[dict[str, object]] = [
        dict(temperature=0),
        dict(temperature=0.9, top_p=0.9),
        dict(temperature=1.0, top_k=40, repetition_penalty=1.2),
        dict(temperature=0.8, frequency_penalty=0.5, presence_penalty=0.3),
        dict(temperature=1.0, min_p=0.05, min_tokens=60, logprobs=2),
        dict(temperature=0.7, n=2, bad_words=[" the"]),
        dict(temperature=0, stop=["zzzz"], logprobs=1),
        dict(temperature=1.0, logit_bias={"30": 2.0}),
    ]
    return {**kinds[i % len(kinds)], "seed": 70 + i, "max_tokens": 90 + i, "prompt": f"{PROMPTS[i % len(PROMPTS)]} ({i})"}


async def ask_all(server: Server, on_tokens: object = None) -> list[dict[int, tuple[str, list, str, int]]]:
    """For each request its choices: text, logprobs, finish reason, and the tokens of all. `on_tokens` is called with every piece."""

    async def ask(client: openai.AsyncOpenAI, i: int) -> dict[int, tuple[str, list, str, int]]:
        wishes = options(i)
        extra = {k: wishes.pop(k) for k in ("top_k", "min_p", "repetition_penalty", "min_tokens", "bad_words") if k in wishes}
        stream = await client.completions.create(
            model="smol", stream=True, stream_options={"include_usage": True}, extra_body=extra, **wishes
        )
        texts: dict[int, str] = {}
        logprobs: dict[int, list] = {}
        reasons: dict[int, str] = {}
        num_tokens = 0
        async for chunk in stream:
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.logprobs is not None:
                    logprobs.setdefault(choice.index, []).extend(zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True))
                if choice.finish_reason is not None:
                    assert choice.index not in reasons
                    reasons[choice.index] = choice.finish_reason
            if callable(on_tokens):
                on_tokens(i)
        return {index: (text, logprobs.get(index, []), reasons[index], num_tokens) for index, text in texts.items()}

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=300) as client:
        return await asyncio.gather(*(ask(client, i) for i in range(NUM_STREAMS)))


def engine_pid(server: Server) -> int:
    pid = server.process.pid
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_32_streams_outlive_a_killed_engine_token_for_token() -> None:
    with serve(*FLAGS) as server:
        undisturbed = asyncio.run(ask_all(server))
        begun: set[int] = set()
        kills: list[int] = []

        def kill_once_all_run(i: int) -> None:
            begun.add(i)
            if not kills and len(begun) == NUM_STREAMS:
                kills.append(engine_pid(server))
                os.kill(kills[0], signal.SIGKILL)

        disturbed = asyncio.run(ask_all(server, kill_once_all_run))
        assert kills and engine_pid(server) != kills[0]
        assert server.metric("canter:engine_restarts_total") == 1
        assert disturbed == undisturbed
        server.wait_idle()


def test_a_killed_frontend_takes_a_stopped_engine_with_it() -> None:
    with serve(*FLAGS) as server:
        engine = engine_pid(server)
        os.kill(engine, signal.SIGSTOP)
        server.process.kill()
        wait_for(lambda: is_gone(engine), 5, "the engine to be gone")
        server.process.wait(10)


def test_a_stopped_engine_is_unhealthy_until_it_goes_on() -> None:
    with serve(*FLAGS, "--engine-stall-timeout", "1") as server:
        body = {"model": "smol", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine_pid(server), signal.SIGSTOP)
            wait_for(lambda: not answers(server), 20, "the server to notice")
            os.kill(engine_pid(server), signal.SIGCONT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert answers(server)


def test_sigterm_lets_16_streams_end() -> None:
    with serve(*FLAGS) as server:
        body = {"model": "smol", "prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}

        async def one(client: httpx.AsyncClient, begun: asyncio.Semaphore) -> list[str]:
            async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                lines = []
                async for line in response.aiter_lines():
                    if not lines:
                        begun.release()
                    if line:
                        lines.append(line)
                return lines

        async def everyone() -> list[list[str]]:
            begun = asyncio.Semaphore(0)
            async with httpx.AsyncClient(timeout=120) as client:
                tasks = [asyncio.create_task(one(client, begun)) for _ in range(16)]
                for _ in tasks:
                    await begun.acquire()
                server.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*tasks)

        for lines in asyncio.run(everyone()):
            assert lines[-1] == "data: [DONE]" and '"completion_tokens":100' in lines[-2] and '"finish_reason":"length"' in lines[-3]
        server.process.wait(30)
        assert server.process.returncode == 0
