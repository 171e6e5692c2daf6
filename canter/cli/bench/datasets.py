"""What a load test asks for: random tokens, shared prefixes, conversations, a text, or a file of one's own."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.checkpoint.resolve import resolve
from canter.cli.args import Parser, add_number
from canter.cli.bench.prompts import HIGHEST_ID, LOWEST_ID
from canter.core.errors import ConfigError
from canter.text.tokenizer import load_tokenizer

DATASETS = ("random", "prefix_repetition", "sharegpt", "sonnet", "custom")
EXACT = ("random", "prefix_repetition")
"""Those whose answers are to have the length that is asked for."""

CHARS_PER_TOKEN = 4
LEAST_TOKENS = 4
MOST_PROMPT_TOKENS = 1024
MOST_TOKENS = 2048
WORDS = (
    "the", "of", "and", "to", "in", "is", "was", "for", "on", "are", "as", "with", "his", "they", "at", "be", "this", "from", "have", "or",
)  # fmt: skip

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt (text or token ids) or messages, and the most tokens of its answer."""

    prompt: str | list[int] | None
    output_len: int
    messages: list[dict[str, Any]] | None = None


def add_dataset_flags(parser: Parser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="Where prompts come from. Default: random.")
    group.add_argument(
        "--dataset-path", metavar="FILE", help="The file of sharegpt (JSON), or of custom (JSON lines with prompt or messages)."
    )
    group.add_argument("--tokenizer", metavar="MODEL", help="Counts the tokens of texts. Default: four characters are a token.")
    add_number(group, "--random-input-len", default=128, doc="Tokens of a prompt that are its own.", least=1)
    add_number(group, "--random-output-len", default=128, doc="Tokens of an answer.", least=1)
    add_number(group, "--random-range-ratio", default=0.0, doc="Lengths differ by up to this part of them, below 1.")
    add_number(group, "--shared-prefix-len", "--random-prefix-len", default=0, doc="Tokens that all prompts begin with.")
    add_number(group, "--prefix-repetition-prefix-len", default=256, doc="Tokens that some prompts begin with.", least=1)
    add_number(group, "--prefix-repetition-suffix-len", default=256, doc="Tokens of a prompt that are its own.", least=1)
    add_number(group, "--prefix-repetition-num-prefixes", default=10, doc="Different beginnings.", least=1)
    add_number(group, "--prefix-repetition-output-len", default=128, doc="Tokens of an answer.", least=1)
    add_number(group, "--sonnet-input-len", default=550, doc="Tokens of a prompt, made of lines of a text that comes with Canter.", least=1)
    add_number(group, "--sonnet-prefix-len", default=200, doc="Tokens of it that all prompts begin with.")
    add_number(group, "--sonnet-output-len", default=150, doc="Tokens of an answer.", least=1)
    add_number(group, "--sharegpt-output-len", default=0, doc="Tokens of an answer; 0: as many as the one in the file has.")
    add_number(group, "--custom-output-len", default=256, doc="Tokens of an answer where a line has no output_tokens.", least=1)


def make_asks(namespace: Namespace, count: int, seed: int) -> list[Ask]:
    """So many requests; they follow from the seed. Raises `ConfigError` for flags or a file that can't be used."""
    rng = random.Random(seed)
    match namespace.dataset_name:
        case "random":
            return list(random_asks(namespace, count, rng))
        case "prefix_repetition":
            return prefix_asks(namespace, count, rng)
        case "sharegpt":
            return chosen(sharegpt_asks(namespace), count, rng)
        case "sonnet":
            return list(sonnet_asks(namespace, count, rng))
        case _:
            return chosen(custom_asks(namespace), count, rng)


def random_asks(namespace: Namespace, count: int, rng: random.Random) -> Iterator[Ask]:
    ratio = namespace.random_range_ratio
    if ratio >= 1:
        raise ConfigError(f"--random-range-ratio must be below 1, got {ratio:g}.")

    def around(length: int) -> int:
        return max(1, rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio)))) if ratio else length

    head = token_ids(rng, namespace.shared_prefix_len)
    for _ in range(count):
        yield Ask(head + token_ids(rng, around(namespace.random_input_len)), around(namespace.random_output_len))


def prefix_asks(namespace: Namespace, count: int, rng: random.Random) -> list[Ask]:
    """Prompts in random order, each beginning equally often."""
    heads = [token_ids(rng, namespace.prefix_repetition_prefix_len) for _ in range(namespace.prefix_repetition_num_prefixes)]
    asks = [
        Ask(heads[i % len(heads)] + token_ids(rng, namespace.prefix_repetition_suffix_len), namespace.prefix_repetition_output_len)
        for i in range(count)
    ]
    rng.shuffle(asks)
    return asks


def sharegpt_asks(namespace: Namespace) -> list[Ask]:
    """The first question of each conversation, and the length of its answer; very short and very long ones are left out."""
    path = _needed_path(namespace)
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Can't read {str(path)!r} as JSON: {error}.") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"{str(path)!r} must hold a list of conversations.")
    count, asks = token_counter(namespace.tokenizer), []
    for conversation in conversations:
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        texts: list[Any] = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)] if isinstance(turns, list) else []
        if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
            continue
        prompt_len, answer_len = count(texts[0]), namespace.sharegpt_output_len or count(texts[1])
        if min(prompt_len, answer_len) < LEAST_TOKENS or prompt_len > MOST_PROMPT_TOKENS or prompt_len + answer_len > MOST_TOKENS:
            continue
        asks.append(Ask(texts[0], answer_len))
    if not asks:
        raise ConfigError(f"{str(path)!r} has no conversation of a usable length.")
    return asks


def sonnet_asks(namespace: Namespace, count: int, rng: random.Random) -> Iterator[Ask]:
    """Lines of a text in random order after the same first lines."""
    tokens = token_counter(namespace.tokenizer)
    text = Path(__file__).with_name("perplexity.txt").read_text(encoding="utf-8")
    sentences = [sentence.strip() + "." for sentence in text.replace("\n", " ").split(". ") if sentence.strip()]
    lengths = [tokens(sentence) for sentence in sentences]
    if namespace.sonnet_prefix_len >= namespace.sonnet_input_len:
        raise ConfigError("--sonnet-prefix-len must be below --sonnet-input-len.")

    def lines(length: int, draw: Callable[[], int]) -> list[str]:
        found = []
        while length > 0:
            i = draw()
            found.append(sentences[i])
            length -= lengths[i]
        return found

    order = iter(range(10**9))
    head = lines(namespace.sonnet_prefix_len, lambda: next(order) % len(sentences))
    rest = namespace.sonnet_input_len - sum(tokens(line) for line in head)
    for _ in range(count):
        prompt = "\n".join(["Go on with this text:", *head, *lines(rest, lambda: rng.randrange(len(sentences)))])
        yield Ask(prompt, namespace.sonnet_output_len)


def custom_asks(namespace: Namespace) -> list[Ask]:
    """A file of lines such as {"prompt": "text or token ids", "output_tokens": 100}, or with messages."""
    path, asks = _needed_path(namespace), []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"Can't read {str(path)!r}: {error}.") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            asks.append(_custom_ask(line, f"{path}, line {number}", namespace.custom_output_len))
    if not asks:
        raise ConfigError(f"{str(path)!r} has no lines.")
    return asks


def _custom_ask(line: str, where: str, output_len: int) -> Ask:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}.") from error
    prompt, messages = (entry.get("prompt"), entry.get("messages")) if isinstance(entry, dict) else (None, None)
    if messages is not None and isinstance(messages, list) and messages:
        prompt = None
    elif not (isinstance(prompt, str) and prompt) and not (isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt)):
        raise ConfigError(f"{where}: expected an object with prompt (a text or token ids) or messages.")
    length = entry.get("output_tokens", output_len)
    if type(length) is not int or length < 1:
        raise ConfigError(f"{where}: output_tokens must be a whole number of at least 1, got {length!r}.")
    return Ask(prompt, length, messages)


def chosen(asks: list[Ask], count: int, rng: random.Random) -> list[Ask]:
    """So many of them in random order, again and again if there are fewer."""
    rng.shuffle(asks)
    return [asks[i % len(asks)] for i in range(count)]


def token_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length)]


def words(ids: list[int]) -> str:
    """Text of as many common words: the same ids give the same words."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in ids)


def token_counter(tokenizer: str | None) -> Count:
    """Counts a text's tokens: exactly with a tokenizer, else by its characters."""
    if tokenizer is None:
        return lambda text: max(1, round(len(text) / CHARS_PER_TOKEN))
    loaded = load_tokenizer(resolve(tokenizer, weights=False))
    return lambda text: len(loaded.encode(text, False))


def _needed_path(namespace: Namespace) -> Path:
    if not namespace.dataset_path:
        raise ConfigError(f"--dataset-name {namespace.dataset_name} needs --dataset-path.")
    return Path(namespace.dataset_path)
