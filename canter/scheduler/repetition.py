"""Outputs that repeat themselves without end, noticed token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canter.core.sampling_params import RepetitionDetection


class RepetitionDetector:
    """Whether an output ends in some pattern of the sizes asked for, `min_count` times in a row.

    For each size p it counts how many tokens in a row equal the one p places before: a pattern stands there c times as soon as
    p * (c - 1) of them do. A token costs a handful of numpy calls over the sizes, whatever the output's length.
    """

    __slots__ = ("_first", "_needed", "_recent", "_runs")

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._first = max(1, wanted.min_pattern_size) - 1
        sizes = np.arange(self._first + 1, wanted.max_pattern_size + 1)
        self._needed = sizes * (wanted.min_count - 1)
        self._runs = np.zeros(len(sizes), np.int64)
        self._recent = np.full(wanted.max_pattern_size, -1, np.int64)  # the last tokens, the latest first

    def append(self, token_id: int) -> bool:
        """Take the next token of the output; True when it completes a repetition."""
        recent, runs = self._recent, self._runs
        runs += 1
        runs *= recent[self._first :] == token_id
        recent[1:] = recent[:-1]
        recent[0] = token_id
        return bool((runs >= self._needed).any())


def make_detector(wanted: RepetitionDetection | None, output: Sequence[int] = ()) -> RepetitionDetector | None:
    """None where nothing is to be detected. `output`: tokens that another engine has generated, and seen no end in."""
    if wanted is None or wanted.max_pattern_size == 0:
        return None
    detector = RepetitionDetector(wanted)
    for token_id in output:
        detector.append(token_id)
    return detector
