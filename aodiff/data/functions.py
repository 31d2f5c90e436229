"""Functions of the Python standard library, one a row, each of its own length.

Methods keep neither their indentation nor their class. Splits share no module.
"python_functions_canvas" are the same, filled up with the tokenizer's end symbol.
"""

import ast
import functools
import textwrap

import numpy as np
from ml_collections import ConfigDict

from aodiff.data import prepared
from aodiff.data.corpora import python_stdlib, split_documents
from aodiff.data.info import CANVAS, DataError, DataInfo, Stats
from aodiff.data.sources import ArraySource, Source
from aodiff.data.tokenizers import make_tokenizer

NAMES = ("python_functions", "python_functions" + CANVAS)
SHORTEST = 40  # characters; shorter ones say little
LONGEST = 8  # characters of a token, at most


def describe(config: ConfigDict) -> DataInfo:
    """The functions of at most `config.seq_len` tokens."""
    return prepared.describe(config)


def functions(source: str, longest: int) -> list[str]:
    """The functions and methods of a module, without decorators; [] if the module is broken.

    Those of `SHORTEST` to `longest` characters.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # some modules are broken on purpose
        return []
    lines = source.split("\n")  # as `ast` does: a form feed ends no line
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = sorted({(n.lineno, n.end_lineno) for n in nodes})
    found = (textwrap.dedent("\n".join(lines[first - 1 : last])) for first, last in spans)
    return [text for text in found if SHORTEST <= len(text) <= longest and parses(text)]


def parses(text: str) -> bool:
    """Whether a text is a Python program."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


@functools.lru_cache(maxsize=4)
def texts_of(longest: int) -> dict[str, list[str]]:
    """The `functions` of the library by split, each text once."""
    found, seen = {}, set()
    for split, modules in split_documents(python_stdlib()).items():
        texts = dict.fromkeys(text for module in modules for text in functions(module, longest))
        found[split] = [text for text in texts if text not in seen]
        seen.update(found[split])
    return found


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Rows with their `length`, or of one length on a canvas; each text once.

    Raises:
      DataError: no function is short enough, or a tokenizer without an end symbol for a canvas.
    """
    tokenizer, n = make_tokenizer(config.tokenizer), config.seq_len
    canvas = config.name.endswith(CANVAS)
    if canvas and tokenizer.eos is None:
        raise DataError(
            f"{config.name} is filled up with the end symbol of a tokenizer, and {tokenizer.spec} "
            f"has none; use byte or gpt2, or {NAMES[0]}"
        )
    found = {}
    for split, texts in texts_of(n if tokenizer.unit == "byte" else LONGEST * n).items():
        rows = [ids for ids in map(tokenizer.encode, texts) if len(ids) <= n]
        if not rows:
            raise DataError(
                f"no function of {split} has at most data.seq_len={n} tokens; use 128 or more"
            )
        tokens = np.full((len(rows), n), tokenizer.eos if canvas else 0, rows[0].dtype)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        length = np.array([len(ids) for ids in rows], np.uint16)
        stats = Stats(len(rows), int(length.sum()))
        fields = {"tokens": tokens} if canvas else {"tokens": tokens, "length": length}
        found[split] = ArraySource(fields, stats)
    return found
