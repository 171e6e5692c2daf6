"""The text side of the served model."""

from __future__ import annotations

from canter.core.config import EngineArgs
from canter.core.logging import get_logger
from canter.text import model_text
from canter.text.model_text import ModelText

__all__ = ["ModelText", "load_model_text"]

logger = get_logger(__name__)


def load_model_text(args: EngineArgs, chat_template: str | None = None) -> ModelText:
    """Read it, and log the sampling parameters that requests get from it. Raises `CheckpointError` or `ConfigError`."""
    text = model_text.load_model_text(args, chat_template)
    if text.defaults:
        logger.info(
            "default sampling parameters, from the model's generation config: %s (--generation-config vllm turns them off)",
            ", ".join(f"{name} {value}" for name, value in text.defaults.items()),
        )
    if text.output_format is not None:
        logger.info("outputs are read as: %s", text.output_format.description)
    return text
