"""A tokenizer from a Hugging Face directory: tokenizer.json, and what the files beside it say of special tokens and chat templates.

Which file wins follows transformers: tokenizer.json says how prompts are framed; named special tokens are special whatever it
says. `add_bos_token` and `add_eos_token` of tokenizer_config.json count only where tokenizer.json has no template of its own and
the tokenizer is one of Llama's kind, which set their framing from these flags when they were published (DeepSeek's are such).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from canter.checkpoint.json_files import read_json_object
from canter.core.errors import CheckpointError
from canter.text.gguf_tokenizer import BuiltTokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAG_CLASSES = ("Llama", "CodeLlama", "Gemma")
_TEMPLATE_DIRECTORIES = ("additional_chat_templates", "chat_templates")


def build_hf_tokenizer(root: Path) -> BuiltTokenizer:
    """Build from the files of a directory. Raises `CheckpointError` when tokenizer.json is missing or a file is malformed."""
    path = root / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{root} holds no tokenizer.json. Convert the tokenizer once (AutoTokenizer.from_pretrained(...).save_pretrained(...)), "
            "or name another directory or GGUF file with --tokenizer."
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer that the tokenizers library reads: {error}.") from None
    backend.no_truncation()
    backend.no_padding()
    config = _read(root / "tokenizer_config.json")
    names = _special_names(root, config)
    _add_missing_tokens(backend, root, config)
    _mark_special(backend, names, config)
    ids = {name: backend.token_to_id(_content(token)) for name, token in names.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    framed = str(config.get("tokenizer_class", "")).startswith(_FLAG_CLASSES) and not _has_template(backend)
    prefix = [bos] if bos is not None and config.get("add_bos_token", True) else []
    suffix = [eos] if eos is not None and config.get("add_eos_token") else []
    return BuiltTokenizer(
        backend, bos, eos, ids.get("unk_token"), ids.get("pad_token"), frozenset(() if eos is None else (eos,)),
        read_chat_templates(root, config), prefix if framed else None, suffix if framed else [],
    )  # fmt: skip


def _has_template(backend: Tokenizer) -> bool:
    return backend.post_processor is not None and b"TemplateProcessing" in backend.post_processor.__getstate__()


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _content(token: Any) -> str:
    """The text of a token, given as a string or as an object with `content`."""
    return str(token["content"] if isinstance(token, dict) else token)


def _added(token: Any, special: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=False)
    flags = {key: bool(token[key]) for key in ("lstrip", "rstrip", "normalized", "single_word") if key in token}
    return AddedToken(token["content"], special=special or bool(token.get("special")), **flags)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _special_names(root: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Role -> token, from tokenizer_config.json or else special_tokens_map.json."""
    fallback = _read(root / "special_tokens_map.json")
    found = {name: config[name] if config.get(name) is not None else fallback.get(name) for name in _NAMED}
    return {name: token for name, token in found.items() if _is_token(token)}


def _missing_tokens(root: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Ids and tokens that older files keep outside tokenizer.json."""
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        if not str(key).isdecimal() or not _is_token(token):
            raise CheckpointError(
                f"{root}/tokenizer_config.json: added_tokens_decoder must map ids to tokens, found {key!r}: {token!r:.80}."
            )
        yield int(key), token
    for content, token_id in _read(root / "added_tokens.json").items():
        yield int(token_id), content


def _add_missing_tokens(backend: Tokenizer, root: Path, config: Mapping[str, Any]) -> None:
    for token_id, token in sorted(_missing_tokens(root, config), key=lambda item: item[0]):
        content = _content(token)
        if backend.token_to_id(content) is None:
            backend.add_tokens([_added(token, special=False)])
            if backend.token_to_id(content) != token_id:
                raise CheckpointError(
                    f"{root}: added token {content!r} should have id {token_id}, but the vocabulary of tokenizer.json "
                    f"gives it {backend.token_to_id(content)}."
                )


def _mark_special(backend: Tokenizer, names: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Make the named and the listed extra tokens special, keeping the flags that tokenizer.json gave them."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = list(extra.values()) if isinstance(extra, dict) else list(extra)
    special = []
    for token in (*names.values(), *filter(_is_token, listed)):
        content = _content(token)
        if content in known:
            if not known[content].special:
                known[content].special = True
                special.append(known[content])
        else:
            special.append(_added(token, special=True))
    backend.add_special_tokens(special)


def read_chat_templates(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template. A chat_template.jinja file wins over tokenizer_config.json, whose templates may be one or a named list."""
    templates: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        templates["default"] = listed
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            templates[entry["name"]] = entry["template"]
    legacy = _read(root / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates.setdefault("default", legacy)
    for directory in _TEMPLATE_DIRECTORIES:
        for path in sorted((root / directory).glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    if (root / "chat_template.jinja").is_file():
        templates["default"] = (root / "chat_template.jinja").read_text(encoding="utf-8")
    return templates
