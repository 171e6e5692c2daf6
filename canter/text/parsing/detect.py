"""Recognising a model's format from its chat template and its vocabulary."""

from __future__ import annotations

from canter.text.parsing.format import Detection
from canter.text.parsing.formats import DETECTIONS
from canter.text.tokenizer import Tokenizer

_NOTHING = Detection()


def detect(tokenizer: Tokenizer, template: str) -> Detection:
    """What fits best; a detection of nothing when nothing does.

    A detection of calls only is completed with thoughts that were recognised for themselves, and the other way round.
    """
    fitting = sorted((d for d in DETECTIONS if _fits(d, tokenizer, template)), key=_strength, reverse=True)
    calls = next((d for d in fitting if d.calls), _NOTHING)
    thoughts = calls if calls.thoughts else next((d for d in fitting if d.thoughts and not d.calls), _NOTHING)
    return Detection(calls.calls, thoughts.thoughts)


def _strength(detection: Detection) -> tuple[int, int]:
    return detection.weight, sum(map(len, (*detection.template, *detection.without, *detection.tokens)))


def _fits(detection: Detection, tokenizer: Tokenizer, template: str) -> bool:
    ids = (tokenizer.token_to_id(token) for token in detection.tokens)
    return (
        all(part in template for part in detection.template)
        and not any(part in template for part in detection.without)
        and all(token_id is not None and token_id in tokenizer.added_token_ids for token_id in ids)
    )
