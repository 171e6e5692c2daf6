"""The text side of a checkpoint, loaded once for the server and for `LLM`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from canter.core.config import EngineArgs
from canter.core.errors import ConfigError
from canter.server import model_text as server_text
from canter.text.model_text import load_model_text
from tests.fakes import model_folder


def test_everything_is_read() -> None:
    text = load_model_text(EngineArgs(model=str(model_folder())))
    assert text.tokenizer.encode("ab") == [97, 98] and text.defaults == {}
    assert text.chat_template.render([{"role": "user", "content": "hi"}]) == "[user]hi\n[assistant]"
    assert load_model_text(EngineArgs(model=str(model_folder())), "{{ 1 }}").chat_template.render([{"role": "user", "content": ""}]) == "1"


def test_the_generation_config_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.5, "top_k": 9}))
    args = EngineArgs(model=str(model_folder()), generation_config=str(tmp_path), override_generation_config={"top_k": 3})
    text = load_model_text(args)
    assert text.generation_config["eos_token_id"] == [5, 6]
    assert text.defaults == {"temperature": 0.5, "top_k": 3}


def test_a_generation_config_without_special_tokens_keeps_the_models(tmp_path: Path) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    for file in model_folder().iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "temperature": 0.1}))
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))
    text = load_model_text(EngineArgs(model=str(tmp_path / "model"), generation_config=str(tmp_path / "other")))
    assert text.generation_config == {"eos_token_id": 7, "top_p": 0.5}
    assert load_model_text(EngineArgs(model=str(tmp_path / "model"), generation_config="vllm")).defaults == {}


def test_a_directory_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="auto, vllm or a directory"):
        load_model_text(EngineArgs(model=str(model_folder()), generation_config=str(tmp_path)))


def test_the_server_tells_the_defaults(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_text.logger, "propagate", True)
    args = EngineArgs(model=str(model_folder()), override_generation_config={"temperature": 0.5})
    with caplog.at_level(logging.INFO, logger=server_text.logger.name):
        text = server_text.load_model_text(args)
    assert text.defaults == {"temperature": 0.5}
    assert "temperature 0.5" in caplog.text
