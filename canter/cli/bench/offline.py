"""The engine of the offline benchmarks, in this process."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import canter
from canter.cli.args import engine_args, given
from canter.core.config import EngineArgs


def load(namespace: Namespace, **defaults: Any) -> canter.LLM:
    """The model that the flags name; `defaults` hold for engine arguments that no flag gives. Says that it is loading."""
    model = engine_args(namespace).model
    print(f"Loading {model} ...", file=sys.stderr, flush=True)
    return canter.LLM(**defaults | given(namespace, EngineArgs) | {"model": model})
