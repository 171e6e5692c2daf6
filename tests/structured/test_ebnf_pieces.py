"""Grammars with rules that come back to themselves: exactly their texts are let through, however the lexer cuts them."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from canter.core.grammar import Matcher, mask_width
from canter.core.structured_outputs import StructuredOutputsParams
from canter.core.vocabulary import Vocabulary
from canter.structured import ebnf_pieces
from canter.structured.compiler import GrammarCompiler
from canter.structured.ebnf import ebnf_to_lark

SIZE = 259
EOS = 2
CHARS = "abéè"  # the last two begin with the same byte
MAX_CHARS = 4
TEXTS = ["".join(chars) for count in range(MAX_CHARS + 1) for chars in product(CHARS, repeat=count)]
Tree = tuple[Any, ...]
"""("text", t), ("class", chars), ("rule", name), ("sequence" or "choice", trees), ("repeat", tree, low, high or None)."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokens = [b""] * 3 + [bytes([byte]) for byte in range(256)]
    return GrammarCompiler(lambda: Vocabulary(SIZE, tokens, {"</s>": EOS}, [EOS], lambda text: [byte + 3 for byte in text.encode()]))


def is_allowed(matcher: Matcher, token: int) -> bool:
    mask = np.zeros(mask_width(SIZE), np.int32)
    matcher.fill(mask)
    return bool(np.unpackbits(mask.view(np.uint8), bitorder="little")[token])


def taken(compiler: GrammarCompiler, grammar: str, texts: list[str]) -> set[str]:
    """Which of these texts are whole outputs."""
    made = compiler.get(StructuredOutputsParams(grammar=grammar))
    found: set[str] = set()
    for text in texts:
        matcher = made.matcher()
        tokens = [byte + 3 for byte in text.encode()]
        if all(is_allowed(matcher, token) and matcher.accept([token]) == 1 for token in tokens) and matcher.may_end:
            found.add(text)
    return found


def written(tree: Tree) -> str:
    kind = tree[0]
    if kind == "text":
        return f'"{tree[1]}"'
    if kind == "class":
        return f"[{tree[1]}]"
    if kind == "rule":
        return str(tree[1])
    if kind == "repeat":
        return f"({written(tree[1])}){{{tree[2]},{'' if tree[3] is None else tree[3]}}}"
    return "(" + (" " if kind == "sequence" else " | ").join(map(written, tree[1])) + ")"


def joined(some: set[str], others: set[str]) -> set[str]:
    return {one + other for one in some for other in others if len(one) + len(other) <= MAX_CHARS}


def texts_of(tree: Tree, rules: dict[str, set[str]]) -> set[str]:
    """The texts of a tree, given some of those of each rule."""
    kind = tree[0]
    if kind == "text":
        return {tree[1]} if len(tree[1]) <= MAX_CHARS else set()
    if kind == "class":
        return set(tree[1])
    if kind == "rule":
        return rules[tree[1]]
    if kind == "choice":
        return set().union(*(texts_of(part, rules) for part in tree[1]))
    if kind == "sequence":
        whole = {""}
        for part in tree[1]:
            whole = joined(whole, texts_of(part, rules))
        return whole
    inner, low, high = texts_of(tree[1], rules), tree[2], tree[3]
    whole, found = {""}, set()
    for count in range((low + MAX_CHARS if high is None else high) + 1):
        found |= whole if count >= low else set()
        whole = joined(whole, inner)
    return found


def language(trees: dict[str, Tree]) -> set[str]:
    """The root's texts of at most MAX_CHARS characters: what the rules yield, from nothing on, until it is no more."""
    rules: dict[str, set[str]] = {name: set() for name in trees}
    while (more := {name: texts_of(tree, rules) for name, tree in trees.items()}) != rules:
        rules = more
    return rules["root"]


def drawn(draw: random.Random, depth: int = 0) -> Tree:
    kind = draw.choice(["text", "class", "rule"] + ([] if depth == 3 else ["sequence", "sequence", "choice", "repeat"]))
    if kind == "text":
        return ("text", "".join(draw.choices(CHARS, k=draw.randint(1, 3))))
    if kind == "class":
        return ("class", "".join(draw.sample(CHARS, draw.randint(1, 3))))
    if kind == "rule":
        return ("rule", draw.choice(["root", "one", "two"]))
    if kind == "repeat":
        low = draw.randint(0, 2)
        return ("repeat", drawn(draw, depth + 1), low, draw.choice([None, low + 1]))
    return (kind, [drawn(draw, depth + 1) for _ in range(draw.randint(2, 3))])


@pytest.mark.parametrize("seed", range(60))
def test_a_random_grammar_lets_exactly_its_texts_through(compiler: GrammarCompiler, seed: int) -> None:
    draw = random.Random(seed)
    while True:
        trees = {name: drawn(draw) for name in ("root", "one", "two")}
        trees["root"] = ("choice", [("sequence", [("repeat", ("class", "ab"), 0, None), trees["root"]]), ("text", "b")])
        expected = language(trees)
        if 1 < len(expected) < len(TEXTS):
            break
    grammar = "\n".join(f"{name} ::= {written(tree)}" for name, tree in trees.items())
    assert taken(compiler, grammar, TEXTS) == expected, grammar


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ('root ::= [a-z]* end\nend ::= "b" | "(" end ")"', {"aab", "b", "ab(b)", "abab"}),
        ('root ::= [a-z]+ "abc" | "(" root ")"', {"aabc", "abcabc", "((zabc))"}),
        ('root ::= [a-c] root [a-c] | "b"', {"aba", "abc", "bbb", "b", "aabaa"}),
        ('root ::= word "foo" | "(" root ")"\nword ::= [a-z]+', {"afoo", "foofoo", "(xfoo)"}),
        ('root ::= "\u00e9"* tail\ntail ::= "\u00e8" | "(" tail ")"', {"\u00e8", "\u00e9\u00e8", "\u00e9\u00e9(\u00e8)"}),
        ('root ::= "a" root | "ab" | "abc" root', {"ab", "aab", "abcab"}),
    ],
)
def test_what_a_piece_could_take_in_is_left_to_what_follows(compiler: GrammarCompiler, grammar: str, texts: set[str]) -> None:
    others = {text[:-1] + "?" for text in texts} | {"", "(", "()"}
    assert taken(compiler, grammar, [*texts, *others]) == texts


@pytest.mark.parametrize(
    ("grammar", "pieces"),
    [
        ('root ::= "[" ws (item ("," ws item)*)? "]" ws\nitem ::= [a-z]+ ws | root\nws ::= [ \\n]*', 4),
        ('root ::= [a-z]+ ("(" root ")")?', 3),
        ('root ::= "true" | "(" root ")" | "truth"', 4),
    ],
)
def test_a_piece_that_takes_in_nothing_else_stays_whole(grammar: str, pieces: int) -> None:
    assert ebnf_to_lark(grammar).count("PART") - sum(line.startswith("PART") for line in ebnf_to_lark(grammar).splitlines()) == pieces


def test_what_is_too_large_to_look_through_stays_whole(monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler) -> None:
    monkeypatch.setattr(ebnf_pieces._Work, "__init__", lambda self: setattr(self, "left", 10))
    grammar = 'root ::= [a-x]* end\nend ::= "b" | "(" end ")"'
    assert taken(compiler, grammar, ["aab", "aa(b)"]) == {"aa(b)"}
