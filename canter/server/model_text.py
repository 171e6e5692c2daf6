"""The text side of the served model: everything of a checkpoint that the frontend needs, read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.checkpoint.json_files import read_json_object
from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve
from canter.core.config import EngineArgs
from canter.core.errors import ConfigError
from canter.core.logging import get_logger
from canter.text.chat_template import ChatTemplate, load_chat_template
from canter.text.prepare import default_sampling
from canter.text.tokenizer import Tokenizer, load_tokenizer

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelText:
    """`defaults` are sampling parameters of requests that give none; `generation_config` also knows the EOS ids.

    A model without a chat template has one that says so when it is rendered.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    generation_config: dict[str, Any]
    defaults: dict[str, Any]


def load_model_text(args: EngineArgs, chat_template: str | None = None) -> ModelText:
    """Read tokenizer, chat template and generation config. Raises `CheckpointError` or `ConfigError`."""
    files = resolve(args.model, args.revision)
    tokenizer = load_tokenizer(resolve(args.tokenizer, args.revision, weights=False) if args.tokenizer else files)
    generation_config = _generation_config(args.generation_config, read_model_config(files, args.hf_overrides).generation)
    defaults = default_sampling(generation_config, args.generation_config, args.override_generation_config)
    if defaults:
        logger.info(
            "default sampling parameters, from the model's generation config: %s (--generation-config vllm turns them off)",
            ", ".join(f"{name} {value}" for name, value in defaults.items()),
        )
    return ModelText(tokenizer, load_chat_template(tokenizer, chat_template), generation_config, defaults)


def _generation_config(mode: str, own: dict[str, Any]) -> dict[str, Any]:
    """The model's generation config, or that of the directory which the argument names."""
    if mode in ("auto", "vllm"):
        return own
    path = Path(mode) / "generation_config.json"
    if not path.is_file():
        raise ConfigError(f"generation_config must be auto, vllm or a directory with a generation_config.json, got {mode!r}.")
    return read_json_object(path)
