"""Grammars with rules that come back to themselves: exactly their texts are let through, however the lexer cuts them."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from canter.core.errors import InvalidRequestError
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


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
LIST = r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
CHESS = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
LEFT = 'root ::= root [-+] term | term\nterm ::= term "*" atom | atom\natom ::= [0-9]+ | "(" root ")"'
RIGHT = 'root ::= [0-9]+ "^" root | [0-9]+ | "-" root'


@pytest.mark.parametrize(
    ("grammar", "fit", "do_not"),
    [
        (
            JSON,
            ['{"a": [1, -2.5e3, {"b\\n": null}], "\u00e9": "\\u00e9"}', "{}", '{\n\t"a":1}'],
            ["[1]", '{"a":}', '{"a":01}', '{"a": "\n"}'],
        ),
        (ARITHMETIC, ["1+2=3\n", "(a +b1) *2 = x_1\n\n1=1\n"], ["1+=2\n", "1+2=3", "(1=1\n", "1 + 2=3\n"]),
        (LIST, ["- a\n- b c\n"], ["- a", "-a\n", "- \n"]),
        (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. d4 d5\n2. exd5 Qxd5+\n10. O-O O-O-O#\n"], ["1. e4 e5\n", "1. i4 e5\n2. a1 a2\n"]),
        (LEFT, ["1", "1+2*3-(4*(5+6))", "12*34*5"], ["", "1+", "(1", "1*+2"]),
        (RIGHT, ["2^3^4", "-2", "--12^-3"], ["2^", "^2", "2-3"]),
    ],
    ids=["json", "arithmetic", "list", "chess", "left", "right"],
)
def test_grammars_as_llama_cpp_writes_them(compiler: GrammarCompiler, grammar: str, fit: list[str], do_not: list[str]) -> None:
    assert taken(compiler, grammar, fit + do_not) == set(fit)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a"**', "line 1, column 14: '*' was not expected"),
        ('root ::= "a"\nb ::= [a', "line 2, column 7: the class of characters has no end"),
        ("root ::= <think>", "line 1, column 10: '<' was not expected"),
        ('root ::= "a" b\nb ::= "x" |\n  c', "line 3, column 3: there is no rule 'c'"),
    ],
)
def test_faults_are_told_with_their_place(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ebnf_to_lark(grammar)
    assert message in str(caught.value)


@pytest.mark.parametrize("inner", ['"x"', "root"])
def test_groups_as_deep_as_they_may_be(compiler: GrammarCompiler, inner: str) -> None:
    grammar = 'root ::= "y" | ' + '("a" ' * 64 + inner + ")?" * 64
    assert taken(compiler, grammar, ["a" * 64 + ("x" if inner == '"x"' else "y"), "a" * 30, "a" * 65]) == {
        "a" * 64 + ("x" if inner == '"x"' else "y"),
        "a" * 30,
    } | ({"a" * 65} if inner == "root" else set())


@pytest.mark.parametrize(
    "rules",
    [
        lambda n: "\n".join([f'r{i} ::= "a" r{i + 1}?' for i in range(n)] + [f'r{n} ::= "b"']),
        lambda n: "\n".join([f'r{i} ::= "a" r{i + 1}? | [a-c]+ "b"' for i in range(n)] + [f'r{n} ::= "b" | root']),
        lambda n: 'r0 ::= "(" r0 ")" | ' + " | ".join(f'"word{i}"' for i in range(n)),
    ],
)
def test_what_is_written_grows_as_the_grammar_does(rules: Any) -> None:
    sizes = [(len(text), len(ebnf_to_lark(text))) for text in ("root ::= r0\n" + rules(n) for n in (50, 100, 1000))]
    assert all(written < 8 * read for read, written in sizes), sizes


def chain(kind: str) -> dict[str, Any]:
    """Thousands of levels, each in the one before."""
    if kind == "ebnf":
        return {"grammar": "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1}?' for i in range(4000)), 'r4000 ::= "b" | root'])}
    if kind == "lark":
        return {"grammar": "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(4000)), 'r4000: "b"'])}
    if kind == "terminals":
        return {"grammar": "\n".join(["start: R0", *(f"R{i}: R{i + 1}" for i in range(8000)), 'R8000: "a"'])}
    links = {f"d{i}": {"type": "object", "properties": {"p": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1500)}
    return {"json": {"$defs": {**links, "d1500": {"type": "null"}}, "$ref": "#/$defs/d0"}}


@pytest.mark.parametrize("kind", ["ebnf", "lark", "terminals", "json"])
def test_no_chain_of_rules_is_too_long_for_the_stack(compiler: GrammarCompiler, kind: str) -> None:
    """LCP#4492: the library descends from rule to rule, and where a stack ends the process ends."""
    matcher = compiler.get(StructuredOutputsParams(**chain(kind))).matcher()
    assert is_allowed(matcher, ord("{" if kind == "json" else "a") + 3)
