"""The seam between a compiled grammar and whoever chooses tokens by it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeAlias

from canter.core.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MaskArray: TypeAlias = "npt.NDArray[np.int32]"
"""A bit for each token id, the lowest bit of the first word for id 0: set where the token may come next. `[..., ceil(V / 32)]`."""


def mask_width(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


class Matcher(Protocol):
    """Where one output stands in its grammar. Not for use from two threads at once."""

    def fill(self, mask: MaskArray) -> None:
        """Write which tokens may come next, `[W]`: none for the padding of the vocabulary, and no token that ends the output."""
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Move on by these tokens, up to the first that the grammar does not allow; returns how many it took."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, one after the other: each is the only one that its mask would hold."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether what was accepted is a whole output."""
        ...

    @property
    def error(self) -> str | None:
        """Why this matcher can't go on, such as a grammar that turned out too complex; None while it can."""
        ...


class Grammar(Protocol):
    """A constraint that has been compiled. Shared by all requests that ask for the same."""

    def matcher(self) -> Matcher:
        """A matcher at the start of an output."""
        ...

    @property
    def error(self) -> str | None:
        """Why no matcher of this grammar can go on any more; None while they can."""
        ...


class Grammars(Protocol):
    """What the engine asks of the compiler of grammars."""

    def get(self, params: StructuredOutputsParams) -> Grammar:
        """The compiled constraint, from the cache or made now. For use within a step, where nothing may be raised: what can't be
        compiled comes as a grammar whose matchers say why."""
        ...

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Compile on a thread of the compiler's own: what `get` gives, later. Raises `QueueFullError`."""
        ...

    def check_now(self, params: StructuredOutputsParams) -> None:
        """Compile, and wait for it. Raises `InvalidRequestError`, also for what takes too long."""
        ...

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: MaskArray) -> None:
        """`Matcher.fill` for many, each into its line of `masks` `[L, W]`."""
        ...

    def shutdown(self) -> None:
        """Compile nothing more, and end the processes that do; doesn't wait for what is being compiled."""
        ...
