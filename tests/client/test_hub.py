from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from canter.client import hub
from canter.core.errors import EngineDeadError, InvalidRequestError, QueueFullError
from canter.core.messages import Outputs, RequestDelta
from canter.core.sampling_params import OutputKind, SamplingParams
from tests.fake_core import FakeCore, say
from tests.fakes import FakeEngineClient


def delta_params(**values) -> SamplingParams:
    return SamplingParams(output_kind=OutputKind.DELTA, **{"max_tokens": 5, **values})


async def collect(stream) -> list:
    return [output async for output in stream]


async def until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became so")


def test_generate_streams_to_the_end() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        outputs = await collect(client.generate("r", list(b"ab"), delta_params()))
        assert "".join(o.outputs[0].text for o in outputs) == "ababa"
        assert outputs[-1].finished
        assert client.hub.num_live == 0
        assert await client.hub.wait_idle(0)

    asyncio.run(main())


def test_a_slow_reader_gets_merged_outputs() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        stream = client.generate("r", list(b"ab"), delta_params(max_tokens=400))
        first = await anext(stream)
        await until(lambda: client.hub.num_live == 0)
        rest = await collect(stream)
        assert len(rest) == 1
        assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 400

    asyncio.run(main())


def test_closing_the_stream_aborts() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        async with aclosing(client.generate("r", [97], delta_params(max_tokens=500, n=2))) as stream:
            await anext(stream)
        assert sorted(client.core.aborted) == ["0_r", "1_r"]
        assert client.hub.num_live == 0

    asyncio.run(main())


def test_cancelling_the_reader_aborts_also_before_the_first_token() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        client.paused = True
        task = asyncio.create_task(collect(client.generate("r", [97], delta_params())))
        await until(lambda: client.core.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.core.aborted == ["r"]

    asyncio.run(main())


def test_abort_by_id_ends_the_stream_with_that_reason() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        client.paused = True
        task = asyncio.create_task(collect(client.generate("r", [97], delta_params())))
        await until(lambda: client.core.requests)
        await client.abort(["r", "unknown"])
        outputs = await task
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert client.core.aborted == ["r"]

    asyncio.run(main())


def test_a_stop_string_aborts_in_the_engine_once() -> None:
    async def main() -> None:
        client = FakeEngineClient(FakeCore(say("one. two.")))
        outputs = await collect(client.generate("r", [97], delta_params(max_tokens=50, stop=["."])))
        assert "".join(o.outputs[0].text for o in outputs) == "one"
        assert client.core.aborted == ["r"]

    asyncio.run(main())


def test_refusals_come_as_raised_errors() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        client.core.refuse = InvalidRequestError("too big")
        with pytest.raises(InvalidRequestError, match="too big"):
            await collect(client.generate("r", [97], delta_params()))
        assert client.hub.num_live == 0

    asyncio.run(main())


def test_the_frontend_refuses_what_the_queue_cannot_hold() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        client.paused = True
        client.hub.max_live = 2
        task = asyncio.create_task(collect(client.generate("a", [97], delta_params())))
        await until(lambda: client.core.requests)
        with pytest.raises(QueueFullError) as caught:
            await collect(client.generate("b", [97], delta_params(n=2)))
        assert caught.value.retry_after > 0
        client.resume()
        await task

    asyncio.run(main())


def test_an_id_in_use_is_refused() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        async with aclosing(client.generate("r", [97], delta_params(max_tokens=500))) as stream:
            await anext(stream)
            with pytest.raises(InvalidRequestError, match="already running"):
                await collect(client.generate("r", [97], delta_params()))

    asyncio.run(main())


def test_fail_all_raises_in_every_reader_after_what_was_there() -> None:
    async def main() -> None:
        client = FakeEngineClient()
        stream = client.generate("r", [97], delta_params(max_tokens=500))
        await anext(stream)
        client.paused = True
        client.hub.fail_all(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError, match="gone"):
            await collect(stream)
        assert client.hub.num_live == 0

    asyncio.run(main())


def test_an_error_in_one_requests_text_leaves_the_others_alone(monkeypatch) -> None:
    async def main() -> None:
        client = FakeEngineClient()
        client.paused = True
        good = asyncio.create_task(collect(client.generate("good", [97], delta_params())))
        bad = asyncio.create_task(collect(client.generate("bad", [97], delta_params(logprobs=0))))
        await until(lambda: len(client.core.requests) == 2)
        malformed = RequestDelta("bad", [97], logprobs=[None])  # type: ignore[list-item]
        client.hub.deliver(Outputs([malformed]))
        with pytest.raises(Exception, match="could not be turned into text"):
            await bad
        client.resume()
        assert (await good)[-1].finished

    asyncio.run(main())


def test_the_observer_is_told_of_tokens_ends_and_steps() -> None:
    calls = []

    class Observer:
        def on_engine_restart(self) -> None:
            calls.append("restart")

        def on_step(self, stats) -> None:
            calls.append("step")

        def on_tokens(self, state, num_tokens, seconds, is_first) -> None:
            calls.append(("tokens", num_tokens, is_first, seconds >= 0))

        def on_state_end(self, state, now) -> None:
            calls.append(("end", state.finish_reason))

        def on_group_end(self, group) -> None:
            calls.append("group")

    async def main() -> None:
        client = FakeEngineClient(observer=Observer())
        await collect(client.generate("r", [97], delta_params(max_tokens=2)))

    asyncio.run(main())
    assert calls == [("tokens", 1, True, True), "step", ("tokens", 1, False, True), ("end", "length"), "step", "group"]


def test_a_full_hub_refuses_before_it_makes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_, **__) -> None:
        raise AssertionError("a request was made")

    async def main() -> None:
        client = FakeEngineClient()
        client.hub.max_live = 4
        monkeypatch.setattr(hub, "RequestGroup", broken)
        with pytest.raises(QueueFullError):
            await collect(client.generate("r", [97], delta_params(n=5)))
        assert client.hub.num_live == 0

    asyncio.run(main())
