"""The engine's own compiler of grammars. Nothing of it is loaded before the first request that wants one."""

from __future__ import annotations

from functools import partial

from canter.core.config import EngineArgs
from canter.core.structured_outputs import StructuredOutputsConfig
from canter.core.vocabulary import Vocabulary
from canter.structured.compiler import GrammarCompiler

MAX_THREADS = 8
"""More don't fill masks any faster."""


def make_grammars(args: EngineArgs, vocab_size: int, num_threads: int) -> GrammarCompiler:
    """A compiler for the model that the arguments name; `vocab_size` counts its logits."""
    config = StructuredOutputsConfig.parse(args.structured_outputs_config)
    return GrammarCompiler(partial(load_vocabulary, args, vocab_size), config, num_threads=min(num_threads, MAX_THREADS))


def load_vocabulary(args: EngineArgs, vocab_size: int) -> Vocabulary:
    """The model's tokens. An engine otherwise knows none of its text, and does without the libraries for it."""
    from canter.text.model_text import load_model_text  # noqa: PLC0415
    from canter.text.prepare import eos_token_ids  # noqa: PLC0415

    text = load_model_text(args)
    return text.tokenizer.vocabulary(vocab_size, eos_token_ids(text.tokenizer, text.generation_config, vocab_size))
