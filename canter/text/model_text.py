"""The text side of a model: everything of a checkpoint that turns text into tokens and back, read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.checkpoint.json_files import read_json_object
from canter.checkpoint.model_config import TOKEN_KEYS, read_model_config
from canter.checkpoint.resolve import CheckpointFiles, resolve
from canter.core.config import EngineArgs
from canter.core.errors import ConfigError
from canter.text.chat_template import ChatTemplate, load_chat_template
from canter.text.parsing.load import load_format
from canter.text.parsing.parser import OutputFormat
from canter.text.prepare import default_sampling
from canter.text.thinking import ThinkingMarkers, find_markers
from canter.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """`defaults` are sampling parameters of requests that give none; `generation_config` also knows the EOS ids; `thinking` is None
    for a model that is not known to think; `output_format` for one whose way of writing tool calls and thoughts isn't known.

    A model without a chat template has one that says so when it is rendered.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    generation_config: dict[str, Any]
    defaults: dict[str, Any]
    thinking: ThinkingMarkers | None = None
    output_format: OutputFormat | None = None


def load_model_text(args: EngineArgs, chat_template: str | None = None) -> ModelText:
    """Read tokenizer, chat template and generation config. Raises `CheckpointError` or `ConfigError`."""
    files = resolve(args.model, args.revision)
    tokenizer = load_tokenizer(_tokenizer_files(args, files))
    generation_config = _generation_config(args.generation_config, read_model_config(files, args.hf_overrides).generation)
    defaults = default_sampling(generation_config, args.generation_config, args.override_generation_config)
    thinking = find_markers(tokenizer, args.reasoning_config)
    template = load_chat_template(tokenizer, chat_template)
    output_format = load_format(tokenizer, template.text, args.tool_call_parser, args.reasoning_parser)
    return ModelText(tokenizer, template, generation_config, defaults, thinking, output_format)


def _tokenizer_files(args: EngineArgs, files: CheckpointFiles) -> CheckpointFiles:
    """The model's own files, or those that the argument names; `revision` is the model's."""
    if args.tokenizer is None or args.tokenizer == args.model:
        return files
    return resolve(args.tokenizer, None, weights=False)


def _generation_config(mode: str, own: dict[str, Any]) -> dict[str, Any]:
    """The model's generation config, or that of the directory which the argument names, with the model's special tokens
    where it has none."""
    if mode in ("auto", "vllm"):
        return own
    path = Path(mode) / "generation_config.json"
    if not path.is_file():
        raise ConfigError(f"generation_config must be auto, vllm or a directory with a generation_config.json, got {mode!r}.")
    return {key: own[key] for key in TOKEN_KEYS if key in own} | read_json_object(path)
