"""A worker with a library that obeys: grammars are texts, and some hang or end the process. Run as the worker is."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from canter.core.grammar import MaskArray, mask_width
from canter.structured.xgrammar_constraints import Job
from canter.structured.xgrammar_messages import Tokens
from canter.structured.xgrammar_worker import Library, serve


class Walk:
    """A text, token by token (a token is its character's code). At `!` a mask hangs, at `~` it takes a while, at `#` the process ends."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    @property
    def may_end(self) -> bool:
        return self._place == len(self._text)

    def accept(self, token_id: int) -> bool:
        fits = not self.may_end and token_id == ord(self._text[self._place])
        self._place += fits
        return fits

    def rollback(self, count: int) -> None:
        self._place -= count

    def fill(self, masks: MaskArray, line: int) -> None:
        masks[line] = 0
        if not self.may_end:
            code = ord(self._text[self._place])
            if code == ord("!"):
                time.sleep(1000)
            if code == ord("~"):
                start = time.thread_time()
                while time.thread_time() < start + 0.04:
                    pass
            if code == ord("#"):
                os._exit(1)
            masks[line, code // 32] = 1 << code % 32 if code % 32 < 31 else -(1 << 31)


class Obedient:
    def __init__(self, tokens: Tokens) -> None:
        self.width = mask_width(tokens.size)

    def compile(self, job: Job) -> tuple[Any, int]:
        if job.text == "wrong":
            raise ValueError("it is wrong")
        if job.text == "slow":
            time.sleep(1000)
        return job.text, 1

    def matcher(self, grammar: Any) -> Walk:
        return Walk(grammar)


def load(tokens: Tokens) -> Library:
    if tokens.size == 1:
        raise RuntimeError("there is nothing to load")
    return Obedient(tokens)


if __name__ == "__main__":
    serve(int(sys.argv[1]), load)
