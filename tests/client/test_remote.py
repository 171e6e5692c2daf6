"""The remote client against a real child process that speaks the protocol."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from canter.client.remote import RemoteClient
from canter.core.config import EngineArgs
from canter.core.errors import ConfigError, EngineDeadError, EngineError, EngineNotReadyError
from canter.core.sampling_params import OutputKind, SamplingParams
from tests.fake_core import INFO
from tests.fakes import FAKE_ENGINE, fake_tokenizer


def params(**values) -> SamplingParams:
    return SamplingParams(output_kind=OutputKind.DELTA, **{"max_tokens": 5, **values})


def run_with_client(body, *flags: str, ready: bool = True, **options) -> None:
    async def main() -> None:
        client = RemoteClient(EngineArgs(), fake_tokenizer(), command=(*FAKE_ENGINE, *flags), **options)
        await client.start()
        try:
            if ready:
                await client.wait_ready()
            await body(client)
        finally:
            await client.shutdown()

    asyncio.run(asyncio.wait_for(main(), 30))


async def text_of(client: RemoteClient, request_id: str, **values) -> str:
    return "".join([o.outputs[0].text async for o in client.generate(request_id, list(b"ab"), params(**values))])


def test_requests_run_side_by_side() -> None:
    async def body(client: RemoteClient) -> None:
        assert client.info == INFO
        assert client.phases == {"weights": 0.25}
        client.check_health()
        texts = await asyncio.gather(*(text_of(client, f"r{i}", max_tokens=i + 1) for i in range(20)))
        assert texts == [("ab" * 20)[: i + 1] for i in range(20)]
        assert client.stats.num_steps > 0
        assert client.num_live == 0

    run_with_client(body)


def test_closing_a_stream_aborts_in_the_engine() -> None:
    async def body(client: RemoteClient) -> None:
        stream = client.generate("r", [97], params(max_tokens=100_000))
        await anext(stream)
        await stream.aclose()
        assert await client.utility("aborted") == ["r"]

    run_with_client(body)


def test_utilities_are_answered_or_refused() -> None:
    async def body(client: RemoteClient) -> None:
        assert await client.utility("echo", 1, "two") == [1, "two"]
        with pytest.raises(EngineError, match="no method nothing"):
            await client.utility("nothing")

    run_with_client(body)


def test_a_start_that_fails_says_why() -> None:
    async def body(client: RemoteClient) -> None:
        with pytest.raises(ConfigError, match="no such model"):
            await client.wait_ready()
        with pytest.raises(EngineDeadError, match="no such model"):
            client.check_health()

    run_with_client(body, "--fail", "no such model", ready=False)


def test_a_process_that_dies_while_loading_is_noticed() -> None:
    async def body(client: RemoteClient) -> None:
        with pytest.raises(EngineDeadError, match="exit code 3"):
            await client.wait_ready()

    run_with_client(body, "--crash", ready=False)


def test_while_loading_it_is_not_ready_and_can_be_stopped() -> None:
    async def body(client: RemoteClient) -> None:
        with pytest.raises(EngineNotReadyError):
            client.check_health()
        with pytest.raises(EngineNotReadyError):
            await anext(client.generate("r", [97], params()))

    run_with_client(body, "--hold", ready=False)


def test_death_ends_every_request_and_every_call() -> None:
    async def body(client: RemoteClient) -> None:
        requests = [asyncio.create_task(text_of(client, f"r{i}", max_tokens=100_000)) for i in range(3)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDeadError}
        await client.wait_dead()
        with pytest.raises(EngineDeadError):
            client.check_health()
        with pytest.raises(EngineDeadError):
            await client.utility("echo")
        with pytest.raises(EngineDeadError):
            await anext(client.generate("r", [97], params()))

    run_with_client(body, "--die-after", "3")


def test_a_killed_process_is_noticed_while_idle() -> None:
    async def body(client: RemoteClient) -> None:
        os.kill(client.process_id, signal.SIGKILL)
        await client.wait_dead()
        with pytest.raises(EngineDeadError, match="signal 9"):
            client.check_health()

    run_with_client(body)


def test_a_stuck_engine_is_unhealthy_only_while_it_owes_work() -> None:
    async def body(client: RemoteClient) -> None:
        client.check_health()
        stream = client.generate("r", [97], params(max_tokens=100_000))
        await anext(stream)
        os.kill(client.process_id, signal.SIGSTOP)
        try:
            with pytest.raises(EngineError, match="has not answered"):
                while True:
                    client.check_health()
                    await asyncio.sleep(0.01)
        finally:
            os.kill(client.process_id, signal.SIGCONT)
        await stream.aclose()

    run_with_client(body, stall_timeout=0.2)


def test_shutdown_lets_requests_end_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        client = RemoteClient(EngineArgs(), fake_tokenizer(), command=(*FAKE_ENGINE, "--delay", "0.01"))
        await client.start()
        folder = Path(client.host.child.directory)
        assert folder.stat().st_mode & 0o777 == 0o700
        await client.wait_ready()
        request = asyncio.create_task(text_of(client, "r", max_tokens=10))
        await asyncio.sleep(0)
        await client.shutdown(drain_timeout=20)
        assert await request == "ababababab"
        assert not folder.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(client.process_id, 0)
        await client.shutdown()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_shutdown_ends_requests_that_take_too_long() -> None:
    async def body(client: RemoteClient) -> None:
        request = asyncio.create_task(text_of(client, "r", max_tokens=100_000))
        await asyncio.sleep(0.01)
        await client.shutdown(drain_timeout=0.01)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await request

    run_with_client(body)
