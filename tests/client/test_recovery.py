"""What becomes of requests when the engine dies under them: against child processes that really die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from canter.client.remote import RemoteClient
from canter.client.restarts import RestartPolicy
from canter.core.black_box import make_black_box, read_running, write_running
from canter.core.config import EngineArgs
from canter.core.errors import EngineDeadError, EngineError, EngineRestartingError
from canter.core.messages import EngineStats
from canter.core.sampling_params import OutputKind, SamplingParams
from tests.fakes import FAKE_ENGINE, fake_tokenizer


def dies_after(num_steps: int) -> tuple[str, ...]:
    """With a pause between steps: what a process has sent in its last moment may be lost with it."""
    return "--die-after", str(num_steps), "--delay", "0.005"


class Watcher:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.restarts = 0
        self.steps: list[EngineStats] = []

    def on_engine_restart(self) -> None:
        self.restarts += 1

    def on_step(self, stats: EngineStats) -> None:
        self.steps.append(stats)

    def on_tokens(self, *_: object) -> None: ...

    def on_state_end(self, *_: object) -> None: ...

    def on_group_end(self, *_: object) -> None: ...


def run(body, *flags: str, max_restarts: int = 20, delay: float = 0.01) -> Watcher:
    watcher = Watcher()

    async def main() -> None:
        policy = RestartPolicy(max_restarts, delay=delay)
        client = RemoteClient(EngineArgs(), fake_tokenizer(), command=(*FAKE_ENGINE, *flags), restarts=policy, observer=watcher)
        await client.start()
        try:
            await client.wait_ready()
            await body(client)
        finally:
            await client.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))
    return watcher


def params(**values) -> SamplingParams:
    return SamplingParams(output_kind=OutputKind.DELTA, **{"max_tokens": 60, **values})


async def outputs_of(client: RemoteClient, request_id: str, prompt: str = "ab", **values) -> list:
    return [output async for output in client.generate(request_id, list(prompt.encode()), params(**values))]


async def text_of(client: RemoteClient, request_id: str, prompt: str = "ab", **values) -> str:
    return "".join(output.outputs[0].text for output in await outputs_of(client, request_id, prompt, **values))


def test_streams_go_on_through_one_death_after_another() -> None:
    """Every life of the engine lasts 20 steps; the longest request needs three."""

    async def body(client: RemoteClient) -> None:
        texts = await asyncio.gather(*(text_of(client, f"r{i}", "abc"[: i % 3 + 1], max_tokens=10 * i + 1) for i in range(6)))
        assert texts == [("abc"[: i % 3 + 1] * 60)[: 10 * i + 1] for i in range(6)]
        assert client.num_live == 0

    watcher = run(body, *dies_after(20))
    assert watcher.restarts >= 2
    counts = [stats.num_steps for stats in watcher.steps]
    assert counts == sorted(counts), "counters must not run backwards"


def test_what_was_told_is_not_told_again() -> None:
    """Logprobs of prompt and output, stop strings, choices, usage: as if nothing had been."""

    async def ask(client: RemoteClient) -> list:
        wishes = dict(n=3, logprobs=2, prompt_logprobs=1, max_tokens=50, stop=["no such"])
        outputs = await outputs_of(client, "r", "abcd", **wishes)
        assert outputs[0].prompt_logprobs is not None
        choices = [[o for output in outputs for o in output.outputs if o.index == i] for i in range(3)]
        return [outputs[0].prompt_logprobs] + [
            (
                "".join(o.text for o in choice),
                [t for o in choice for t in o.token_ids],
                [p for o in choice for p in o.logprobs],
                choice[-1].finish_reason,
                choice[-1].cumulative_logprob,
            )
            for choice in choices
        ]

    found: list[list] = []

    async def body(client: RemoteClient) -> None:
        found.append(await ask(client))

    assert run(body).restarts == 0
    assert run(body, *dies_after(20)).restarts == 2
    assert found[0] == found[1]


def test_a_request_without_a_seed_keeps_the_one_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    async def body(client: RemoteClient) -> None:
        real = client._hub._send
        monkeypatch.setattr(client._hub, "_send", lambda message: (sent.append(message), real(message)))
        await asyncio.gather(outputs_of(client, "a", temperature=1.0), outputs_of(client, "b", temperature=1.0))

    run(body, *dies_after(40))
    seeds = {name: {m.sampling.seed for m in sent if getattr(m, "request_id", None) == name} for name in "ab"}
    assert len(sent) == 4 and len(seeds["a"]) == len(seeds["b"]) == 1 and seeds["a"] != seeds["b"]
    assert None not in seeds["a"]


def test_while_it_restarts_requests_wait_and_calls_fail() -> None:
    async def body(client: RemoteClient) -> None:
        stream = client.generate("r", [97], params(max_tokens=300))
        await anext(stream)
        call = asyncio.create_task(client.utility("never"))
        os.kill(client.process_id, signal.SIGSTOP)
        await asyncio.sleep(0)
        os.kill(client.process_id, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="signal 9"):
            await call
        assert client.is_restarting
        with pytest.raises(EngineRestartingError):
            client.check_health()
        with pytest.raises(EngineRestartingError):
            await client.utility("echo")
        late = asyncio.create_task(text_of(client, "late", max_tokens=3))
        left = client.generate("left", [97], params())
        leaving = asyncio.ensure_future(anext(left))
        await asyncio.sleep(0)
        assert client.num_live == 3 and not late.done()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await client.abort(["r"])
        rest = [output async for output in stream]
        assert rest[-1].outputs[0].finish_reason == "abort", "an abort needs no engine"
        assert await late == "aba"
        assert client.num_live == 0 and not client.is_restarting
        client.check_health()
        assert await client.utility("echo", 1) == [1]
        assert await client.utility("aborted") == [], "the new engine has never heard of them"

    assert run(body).restarts == 1


def test_a_pause_outlives_the_engine() -> None:
    async def body(client: RemoteClient) -> None:
        stream = client.generate("r", [97], params(max_tokens=100))
        await anext(stream)
        await client.utility("pause")
        os.kill(client.process_id, signal.SIGKILL)
        while not client.is_restarting:
            await asyncio.sleep(0.01)
        while client.is_restarting:
            await asyncio.sleep(0.01)
        late = asyncio.create_task(text_of(client, "late", "a", max_tokens=3))
        assert await client.utility("num_run") == 0
        await asyncio.sleep(0.05)
        assert await client.utility("num_run") == 0 and not late.done(), "it was paused before it ran anything"
        await client.utility("resume")
        assert await late == "aaa"
        assert [output async for output in stream][-1].finished
        os.kill(client.process_id, signal.SIGKILL)
        while not client.is_restarting:
            await asyncio.sleep(0.01)
        assert await text_of(client, "after", max_tokens=3) == "aba", "and is over when it was ended"

    run(body)


def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    marker = tmp_path / "loaded"

    async def body(client: RemoteClient) -> None:
        stream = client.generate("r", [97], params(max_tokens=400))
        text = (await anext(stream)).outputs[0].text
        os.kill(client.process_id, signal.SIGKILL)
        while client.host.restarts.num_recent < 3:
            await asyncio.sleep(0.01)
        marker.unlink()
        text += "".join([output.outputs[0].text async for output in stream])
        assert text == "a" * 400

    assert run(body, "--loads-once", str(marker)).restarts == 1, "of a ready engine only one has died"


def test_after_too_many_restarts_requests_end_with_the_reason() -> None:
    async def body(client: RemoteClient) -> None:
        with pytest.raises(EngineDeadError, match="exit code 4"):
            await text_of(client, "r", max_tokens=400)
        await client.wait_dead()
        with pytest.raises(EngineDeadError):
            client.check_health()
        assert not client.is_restarting

    assert run(body, *dies_after(20), max_restarts=2).restarts == 3


def test_a_request_that_kills_the_engine_ends_alone() -> None:
    """Once and twice in company, then alone; the others never notice."""

    async def body(client: RemoteClient) -> None:
        others = [asyncio.create_task(text_of(client, f"r{i}", max_tokens=300 + i)) for i in range(6)]
        while not client.num_live:
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="died each time it worked on this request"):
            await text_of(client, "bad", "xyz")
        assert await asyncio.gather(*others) == [("ab" * 400)[: 300 + i] for i in range(6)]
        client.check_health()

    assert run(body, "--poison", "x").restarts == 3


def test_a_killer_that_runs_alone_is_given_two_lives() -> None:
    async def body(client: RemoteClient) -> None:
        with pytest.raises(EngineError, match="died each time"):
            await text_of(client, "bad", "xyz")
        assert await text_of(client, "good", max_tokens=4) == "abab"

    assert run(body, "--poison", "x").restarts == 2


def test_two_killers_are_told_from_each_other() -> None:
    async def body(client: RemoteClient) -> None:
        tasks = [asyncio.create_task(text_of(client, name, prompt)) for name, prompt in [("x1", "x"), ("g", "ab"), ("x2", "xx")]]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert found[1] == "ab" * 30
        assert isinstance(found[0], EngineError) and isinstance(found[2], EngineError)

    assert 4 <= run(body, "--poison", "x").restarts <= 5


def test_a_suspect_that_leaves_does_not_hold_up_the_others() -> None:
    async def body(client: RemoteClient) -> None:
        bad = asyncio.create_task(text_of(client, "bad", "xyz"))
        good = asyncio.create_task(text_of(client, "good", max_tokens=30))
        while client._hub._groups["bad"].cleared is None if "bad" in client._hub._groups else True:
            await asyncio.sleep(0)
        bad.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await bad
        assert await good == "ab" * 15

    run(body, "--poison", "x", "--delay", "0.05")


def test_shutdown_while_it_waits_to_restart() -> None:
    async def body(client: RemoteClient) -> None:
        request = asyncio.create_task(text_of(client, "r", max_tokens=500))
        while client.host.restarts.num_recent < 2:
            await asyncio.sleep(0.01)
        await client.shutdown()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await request
        assert not client.is_restarting

    run(body, *dies_after(20), delay=30.0)


def test_a_drain_outlives_the_engine() -> None:
    async def body(client: RemoteClient) -> None:
        request = asyncio.create_task(text_of(client, "r", max_tokens=50))
        await asyncio.sleep(0)
        await client.shutdown(drain_timeout=30)
        assert await request == "ab" * 25

    run(body, *dies_after(30))


def test_delays_grow_and_old_restarts_are_forgotten() -> None:
    policy = RestartPolicy(4, window=100.0)
    assert [policy.next_delay(now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.0, 1.0, 2.0, 4.0, None]
    assert policy.next_delay(101.5) == 2.0, "two of four are old"
    assert RestartPolicy(99).next_delay(0.0) == 0.0


def test_a_black_box_keeps_the_last_that_was_written() -> None:
    fd = make_black_box()
    assert read_running(fd) is None
    for ids in ([], ["a", "bc"], ["d"]):
        write_running(fd, ids)
        assert read_running(fd) == frozenset(ids)
    os.close(fd)
