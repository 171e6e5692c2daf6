"""Lines of text that stress a tokenizer, the same on every run."""

from __future__ import annotations

import random

# ruff: noqa: SIM905
_WORDS = (
    "the quick brown fox jumps over the lazy dog I'm you're WE'LL don't DON'T it's ITS' o'clock naïve café Straße İstanbul ſ's "
    "résumé coöperate 12 3.14 1,000,000 0x1F 2024-01-31 v1.2.3 foo_bar fooBar HTTPServer e=mc² ½ Ⅳ ٣٤٥ user@example.com "
    "https://example.com/a?b=c&d=%20e #hashtag $100 50% (a) [b] {c} <d> \"e\" 'f' `g` ... --- !!! ??? … — – “quoted” ‘s"
).split()
_SCRIPTS = (
    "日本語の文章です。これはテスト、テスト。",
    "中文字符测试，你好世界！一二三",
    "한국어 문장입니다. 안녕하세요",
    "مرحبا بالعالم، كيف حالك؟ ٢٠٢٤",
    "שלום עולם",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "नमस्ते दुनिया कैसे हो",
    "สวัสดีชาวโลก",
    "Xin chào thế giới",
    "ქართული ᲥᲐᲠᲗᲣᲚᲘ",
    "አማርኛ",
    "e\u0301a\u0300o\u0308 combining",
    "ﬁ ﬂ ﬀ ligatures Å Å K K Ω",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛",
    "ʼn ǆ ǅ ß ẞ",
    "ㄱㄴㄷ ㅏㅑ",
    "龘靐齉爩",
    "\U0002a6a5\U0002b81a",
)
_EMOJI = ("🙂", "👩‍👩‍👧‍👦", "🇩🇪🇯🇵", "👍🏽", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "1️⃣", "☃", "\U0001fae8", "🤷🏿‍♂️")
_CODE = (
    "def f(x: int = 3) -> str:\n    return f'{x!r:>10}'  # comment\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }",
    "\tif (x == NULL)\r\n\t\treturn -1;\r\n",
    "SELECT * FROM t WHERE a='b''c' AND d>=10;",
    '<div class="a"><p>hi</p></div><br/><table>',
    '{"a": [1, 2.5e-3, null, true], "b": "\\u00e9"}',
    "$ ls -la | grep '^d' && echo \"done\"",
    "\\frac{a}{b} \\alpha_{i}^{2}",
    "x = lambda *a, **k: (a, k)\n\n\n\nclass A:\n        pass\n",
    '#include <stdio.h>\nint main(void){printf("%d\\n",1);}',
    "a&&b||!c^~d%e",
)
_SPACES = (
    " ",
    "  ",
    "   ",
    "    ",
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    " \n",
    "\n ",
    " \t ",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u200b",
    "\ufeff",
    "\u2028",
    "\u0085",
    "\x0b",
    "\x0c",
    " " * 17,
    "\n" * 9,
)
_CONTROL = tuple(chr(code) for code in (0, 1, 7, 8, 27, 31, 127, 128, 159, 0xAD, 0x202E, 0x2060, 0xFFFD, 0xFFFE, 0xE000, 0x10FFFF))
_SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<bos>",
    "<eos>",
    "<pad>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<unused5>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<repo_name>",
    "<s>",
    "</s>",
    "[INST]",
    "<0x41>",
    "<0xE4>",
    "[PAD151700]",
    "▁",
    "▁▁the",
    "Ġ",
    "Ċ",
    "[multimodal]",
    "<|im_start",
    "im_end|>",
    "<h1>",
    "</h1>",
    "<mask>",
)


def _piece(rng: random.Random) -> str:
    kind = rng.randrange(10)
    pools = (_WORDS, _WORDS, _WORDS, _SCRIPTS, _EMOJI, _CODE, _SPACES, _SPACES, _CONTROL, _SPECIAL)
    if kind == 0 and rng.random() < 0.2:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789") for _ in range(rng.choice((20, 100, 600))))
    if kind == 1 and rng.random() < 0.2:
        return "".join(
            chr(rng.choice((rng.randrange(0x20, 0x250), rng.randrange(0x370, 0xD800), rng.randrange(0xE000, 0x1F700)))) for _ in range(8)
        )
    if kind == 2 and rng.random() < 0.2:
        return str(rng.randrange(10 ** rng.randrange(1, 15)))
    return rng.choice(pools[kind])


def lines(count: int, seed: int = 0) -> list[str]:
    """`count` lines: first every stock piece by itself, then mixtures of them."""
    stock = [
        *_WORDS,
        *_SCRIPTS,
        *_EMOJI,
        *_CODE,
        *_SPACES,
        *_CONTROL,
        *_SPECIAL,
        "",
        "a" * 3000,
        "ab " * 500,
        "é" * 500,
        "!" * 300,
        "\n" * 60,
        "  x" * 50,
    ]
    rng = random.Random(seed)
    while len(stock) < count:
        joint = rng.choice(("", " ", " ", "  "))
        stock.append(joint.join(_piece(rng) for _ in range(rng.randrange(1, 12))))
    return stock[:count]
