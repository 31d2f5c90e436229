"""Questions with answers of very different length: digits by a rule, until the rule ends them.

A row is "3817=" and then digits, each the digit four before it, plus 3 where the digit right before
it is 5 or more, without carry (3 + 3, 8 + 3, 1, 7, 6 + 3, ...: 61179...), until an even digit is
followed by 0. What is left of the row holds the end symbol. Four digits have one successor and one
predecessor, so that far digits look random from the question, and nothing but working it out says
how long the answer is: 1 to 58 digits in rows of 64, half of them at most 15.

Rows are cut at random behind their answer's first end symbol: the last symbol of a row is an end
symbol however long the row is.
"""

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.sources import ArraySource, Source
from aodiff.data.synthetic import ROWS, uniforms
from aodiff.data.tokenizers import SymbolsTokenizer

VERSION = 1
SEEDS = 4  # digits that a question begins with
PROMPT = SEEDS + 1  # and "="


@dataclasses.dataclass(frozen=True)
class SumsTokenizer(SymbolsTokenizer):
    """Digits, "=", and the end, which is shown as nothing."""

    spec: str = "symbols:0123456789=."
    eos: int = 11

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return super().decode(ids[ids != self.eos])


def sums(seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows (N, seq_len) uint16 whose answer and an end symbol fit, and lengths (N,) of answers,
    in the order of their questions."""
    questions = np.arange(10**SEEDS)
    digits = [questions // 10**i % 10 for i in reversed(range(SEEDS))]
    rows = np.full((len(questions), seq_len), SumsTokenizer.eos, np.uint16)
    rows[:, :PROMPT] = np.stack([*digits, np.full(len(rows), 10)], axis=1)
    written, ended = np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
    for i in range(PROMPT, seq_len - 1):
        digits.append((digits[-SEEDS] + np.where(digits[-1] >= 5, 3, 0)) % 10)
        rows[:, i] = np.where(ended, SumsTokenizer.eos, digits[-1])
        written += ~ended
        ended |= (digits[-1] == 0) & (digits[-2] % 2 == 0)
    return rows[ended], written[ended]


def describe(config: ConfigDict) -> DataInfo:
    """The questions of `config`, which are those with an answer shorter than a row."""
    if config.seq_len < PROMPT + 2:
        raise DataError(
            f"data.seq_len is {config.seq_len}; rows of sums have at least {PROMPT + 2} symbols."
        )
    total = len(sums(config.seq_len)[0])
    if not 1 <= config.eval_rows <= total // 4:
        raise DataError(
            f"data.eval_rows is {config.eval_rows}; of the {total} questions 1 to {total // 4} can "
            "be held out for each of validation and test."
        )
    tokenizer = SumsTokenizer()
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
    rows, written = sums(n)
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
            f"sums/{VERSION}",
        )
        for split, part in zip(("validation", "test", "train"), parts, strict=True)
    }
