"""Undo the spacing of published word-level corpora, so that a subword model sees plain text.

Source: the clean-up rules of the zero-shot evaluations of SEDD, RADD and AO-GPT, in their order.
"""

import re
from collections.abc import Callable

Rule = tuple[str, str]  # regular expression, replacement


def _apply(text: str, rules: tuple[Rule, ...]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


# Blanks just inside a pair go away: "( a )" becomes "(a)".
_INSIDE: tuple[Rule, ...] = (
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
)
_QUOTES: tuple[Rule, ...] = (
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)

_WIKITEXT: tuple[Rule, ...] = (
    (r"s '", "s'"),
    (r" @([-,.])@ ", r"\1"),
    (r" ([:;.!?,]) ", r"\1 "),
    *_INSIDE,
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    *_QUOTES,
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (" \u00b0 ", "\u00b0"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)

_PTB: tuple[Rule, ...] = (
    (r" 's", "'s"),
    (r"s ' ", "s' "),
    (r" n't", "n't"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r"\\/", "/"),
    # A match takes the blank that the next " N " needs, hence the repetition.
    *((r" N ", " 1 "),) * 10,
    (r"\$ 1", "$1"),
    (r"# 1", "#1"),
    (r"<unk>", "?"),
)

_LM1B: tuple[Rule, ...] = (
    (r"(https?) : / / ", r"\1://"),
    (r" '(\w+)", r"'\1"),
    (r" (\w+) \. ", r" \1. "),
    (r" (\w+) \.$", r" \1."),
    (r" ([?!]) ", r"\1 "),
    (r" ([?!])$", r"\1"),
    (r" ([,:;]) ", r"\1 "),
    (r" / ", "/"),
    (r"\" ([^\"]+) \"", r'"\1"'),
    (r"' ([^']+) '", r"'\1'"),
    (r"\( ([^()]+) \)", r"(\1)"),
    (r"\[ ([^\[\]]+) \]", r"[\1]"),
    (r"([$\u00a3\u20ac]) ", r"\1"),
)


def wikitext(text: str) -> str:
    """WikiText-2 and WikiText-103, raw or with `<unk>`."""
    return _apply(text, _WIKITEXT)


def ptb(text: str) -> str:
    """Penn Treebank as distributed for language modelling."""
    return _apply(text, _PTB)


def lm1b(text: str) -> str:
    """The One Billion Word benchmark."""
    return _apply(text, _LM1B)


def lambada(text: str) -> str:
    """LAMBADA in the form published with GPT-2: straight quotes, one newline in front."""
    return "\n" + text.replace("\u201c", '"').replace("\u201d", '"').strip()


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "wikitext": wikitext,
    "ptb": ptb,
    "lm1b": lm1b,
    "lambada": lambada,
}
