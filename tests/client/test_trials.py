"""Who is blamed for the death of an engine: the bookkeeping alone, over an engine that dies when told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from canter.core.errors import EngineError
from canter.core.messages import Outputs, RequestDelta
from canter.core.sampling_params import OutputKind, SamplingParams
from tests.fake_core import FakeCore
from tests.fakes import FakeEngineClient


class Mortal:
    """A client whose engine is replaced by a new one at `die`."""

    def __init__(self) -> None:
        self.client = FakeEngineClient()
        self.client.paused = True
        self.hub = self.client.hub
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self.resuming: asyncio.Task[None] | None = None

    async def ask(self, *names: str, max_tokens: int = 100) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._ask(name, max_tokens))
        await settle()

    async def _ask(self, name: str, max_tokens: int) -> str:
        params = SamplingParams(output_kind=OutputKind.DELTA, max_tokens=max_tokens)
        return "".join([o.outputs[0].text async for o in self.client.generate(name, list(b"ab"), params)])

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.hub.deliver(Outputs(self.client.core.step(), self.client.core.stats()))
            await settle()

    async def die(self, *running: str, unknown: bool = False) -> None:
        """The engine dies while it runs these, or all; the next one is there at once."""
        if self.resuming is not None:
            self.resuming.cancel()
            await asyncio.gather(self.resuming, return_exceptions=True)
        ids = frozenset(running or self.client.core.requests)
        self.client.core = FakeCore()
        self.hub.hold(None if unknown else ids)
        await settle()
        self.resuming = asyncio.create_task(self.hub.resume())
        await settle()

    @property
    def in_engine(self) -> list[str]:
        return list(self.client.core.requests)

    def failed(self) -> set[str]:
        return {name for name, task in self.tasks.items() if task.done() and not task.cancelled() and task.exception() is not None}

    async def finish(self) -> None:
        while self.hub.num_live:
            await self.step()
        assert self.resuming is None or self.resuming.done()
        for name, task in self.tasks.items():
            if task.cancelled():
                continue
            if name in self.failed():
                assert isinstance(task.exception(), EngineError)
            else:
                assert await task == "ab" * 50, name


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def play(body: Callable[[Mortal], Awaitable[None]]) -> None:
    async def main() -> None:
        mortal = Mortal()
        await body(mortal)
        await mortal.finish()

    asyncio.run(main())


def test_one_death_is_forgiven_to_all() -> None:
    async def body(m: Mortal) -> None:
        await m.ask("a", "b", "c")
        await m.step(3)
        await m.die()
        assert m.in_engine == ["a", "b", "c"] and not m.failed()
        assert [len(r.output_token_ids) for r in m.client.core.seen] == [3, 3, 3]

    play(body)


def test_who_gets_on_between_two_deaths_is_no_suspect() -> None:
    async def body(m: Mortal) -> None:
        await m.ask("a", "b")
        for _ in range(5):
            await m.step(8)
            await m.die()
            assert m.in_engine == ["a", "b"] and not m.failed()

    play(body)


def test_suspects_are_tried_one_after_another_and_then_the_others_go_on() -> None:
    async def body(m: Mortal) -> None:
        await m.ask("a", "b")
        await m.die()
        await m.step(7)
        await m.ask("new")
        await m.die()
        assert m.in_engine == ["a"]
        await m.ask("newer")
        await m.step(7)
        assert m.in_engine == ["a"]
        await m.step()
        assert m.in_engine == ["a", "b"], "what has passed goes on beside the next"
        await m.step(8)
        assert m.in_engine == ["a", "b", "new", "newer"] and not m.failed()

    play(body)


def test_the_engine_dies_of_the_one_on_trial() -> None:
    async def body(m: Mortal) -> None:
        await m.ask("a", "bad", "c")
        await m.die()
        await m.die()
        await m.step(8)
        assert m.in_engine == ["a", "bad"]
        await m.die()
        assert m.failed() == {"bad"}
        await m.step(8)
        assert m.in_engine == ["a", "c"] or m.in_engine == ["c", "a"]

    play(body)


@pytest.mark.parametrize("unknown", [False, True])
def test_alone_twice_is_enough_when_it_is_known(unknown: bool) -> None:
    async def body(m: Mortal) -> None:
        await m.ask("bad")
        await m.die(unknown=unknown)
        await m.die(unknown=unknown)
        assert m.failed() == (set() if unknown else {"bad"})
        await m.die(unknown=unknown)
        assert m.failed() == {"bad"}, "it was tried alone"

    play(body)


def test_who_only_waited_is_not_counted() -> None:
    async def body(m: Mortal) -> None:
        await m.ask("a", "b", "waiting")
        await m.die("a", "b")
        await m.die("a", "b")
        assert m.in_engine == ["a"]
        await m.step(8)
        await m.step(8)
        assert m.in_engine == ["a", "b", "waiting"]
        await m.die("waiting", "a")
        await m.die("waiting")
        assert m.failed() == {"waiting"}

    play(body)


def test_a_suspect_that_left_spoils_the_next_trial_only() -> None:
    """Its last steps may still have been on their way."""

    async def body(m: Mortal) -> None:
        await m.ask("bad", "good")
        await m.die()
        await m.die()
        assert m.in_engine == ["bad"]
        m.tasks["bad"].cancel()
        await settle()
        assert m.in_engine == ["good"]
        await m.die("good")
        assert m.failed() == set() and m.in_engine == ["good"]
        del m.tasks["bad"]

    async def aborted(m: Mortal) -> None:
        await m.ask("bad", "good")
        await m.die()
        await m.die()
        await m.client.abort(["bad"])
        await settle()
        assert m.in_engine == ["good"]
        await m.die("bad", "good")
        assert m.failed() == set() and m.in_engine == ["good"]
        del m.tasks["bad"]

    play(body)
    play(aborted)


def test_what_the_engine_refuses_anew_is_told() -> None:
    async def body(m: Mortal) -> None:
        await m.ask("a", "b")
        await m.die()
        m.hub.deliver(Outputs([RequestDelta("a", [], "error", error="it does not fit", error_type="InvalidRequestError")]))
        await settle()
        m.client.core.abort(["a"])
        assert "it does not fit" in str(m.tasks["a"].exception())
        del m.tasks["a"]

    play(body)
