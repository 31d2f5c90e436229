"""Questions with answers of very different length: letters by a rule, until the rule ends them.

A row is "cpm=" and then letters a to t, each the letter three before it, moved on by 3 places where
the letter right before it is one of k to t (c + 3, p + 0, m + 3, f + 3, ...: "fpp..."), until an
"a" is written. What is left of the row holds the end symbol. Three letters have one successor and
one predecessor, so that far letters look random from the question, and nothing but working it out
says how long an answer is: 1 to 43 letters in rows of 48, half of them at most 15.

Rows are cut at random behind their answer's first end symbol: the last symbol of a row is an end
symbol however long the row is.
"""

import dataclasses
import string

import numpy as np
from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.sources import ArraySource, Source
from aodiff.data.synthetic import ROWS, uniforms
from aodiff.data.tokenizers import SymbolsTokenizer

VERSION = 1
LETTERS = string.ascii_lowercase[:20]
SEEDS = 3  # letters of a question
PROMPT = SEEDS + 1  # and "="


@dataclasses.dataclass(frozen=True)
class UnfoldTokenizer(SymbolsTokenizer):
    """Letters, "=", and the end, which is shown as nothing."""

    spec: str = f"symbols:{LETTERS}=."
    eos: int = len(LETTERS) + 1

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return super().decode(ids[ids != self.eos])


def unfolded(seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows (N, seq_len) uint16 whose answer and an end symbol fit, and lengths (N,) of answers,
    in the order of their questions."""
    size, end = len(LETTERS), UnfoldTokenizer.eos
    questions = np.arange(size**SEEDS)
    letters = [questions // size**i % size for i in reversed(range(SEEDS))]
    rows = np.full((len(questions), seq_len), end, np.uint16)
    rows[:, :PROMPT] = np.stack([*letters, np.full(len(rows), size)], axis=1)
    written, ended = np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
    for i in range(PROMPT, seq_len - 1):
        letters.append((letters[-SEEDS] + np.where(letters[-1] >= size // 2, 3, 0)) % size)
        rows[:, i] = np.where(ended, end, letters[-1])
        written += ~ended
        ended |= letters[-1] == 0
    return rows[ended], written[ended]


def describe(config: ConfigDict) -> DataInfo:
    """The questions of `config`, which are those with an answer shorter than a row."""
    if config.seq_len < PROMPT + 2:
        raise DataError(
            f"data.seq_len is {config.seq_len}; rows of unfold have at least {PROMPT + 2} symbols."
        )
    total = len(unfolded(config.seq_len)[0])
    if not 1 <= config.eval_rows <= total // 4:
        raise DataError(
            f"data.eval_rows is {config.eval_rows}; of the {total} questions 1 to {total // 4} can "
            "be held out for each of validation and test."
        )
    tokenizer = UnfoldTokenizer()
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=tokenizer.vocab_size,
        unit=tokenizer.unit,
        tokenizer=tokenizer,
        entropy=np.log(total) / config.seq_len,
    )


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """All questions, shuffled by `law_seed`: `eval_rows` for validation, as many for test, the rest
    to learn from. Fields are `tokens`, `prompt_len` and `length`."""
    describe(config)
    n, held, seed = config.seq_len, config.eval_rows, config.law_seed
    rows, written = unfolded(n)
    shuffled = permute(np.arange(len(rows)), len(rows), seed)
    shortest = PROMPT + written + 1
    spare = uniforms(seed, ROWS, np.arange(len(rows)), 1)[:, 0] * (n + 1 - shortest)
    fields = {
        "tokens": rows,
        "prompt_len": np.full(len(rows), PROMPT, np.uint16),
        "length": (shortest + spare.astype(np.int64)).astype(np.uint16),
    }
    parts = np.split(shuffled, [held, 2 * held])
    return {
        split: ArraySource(
            {name: field[part] for name, field in fields.items()},
            Stats(len(part), len(part) * n),
            f"unfold/{VERSION}",
        )
        for split, part in zip(("validation", "test", "train"), parts, strict=True)
    }
