"""Questions with answers of very different length: last digits of sums, as many as are asked for.

A row is "38l=" and then as many digits as the letter says (a 1, b 2, ... z 26, A 27, ... Z 52),
each the last digit of the sum of the two before it (1, 9, 0, 9, ...), then the end symbol up to the
length of the row. The question says how long the answer is; its digits are found one by one.
"""

import dataclasses
import string

import numpy as np
from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.sources import ArraySource, Source
from aodiff.data.tokenizers import SymbolsTokenizer

VERSION = 1
PROMPT = 4  # two digits, a letter, "="
MOST = len(string.ascii_letters)


@dataclasses.dataclass(frozen=True)
class SumsTokenizer(SymbolsTokenizer):
    """Digits, "=", letters, and the end, which is shown as nothing."""

    spec: str = f"symbols:{string.digits}={string.ascii_letters}."
    eos: int = 11 + MOST

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return super().decode(ids[ids != self.eos])


def sums(first: np.ndarray, second: np.ndarray, number: np.ndarray, seq_len: int) -> np.ndarray:
    """Rows (N, seq_len) uint16 of questions: digits `first` and `second`, (N,), and `number` (N,)
    of digits to write, 1 to seq_len - 5."""
    rows = np.full((len(first), seq_len), SumsTokenizer.eos, np.uint16)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = first, second, number + 10, 10
    pair = first, second
    for i in range(int(number.max())):
        pair = pair[1], (pair[0] + pair[1]) % 10
        rows[:, PROMPT + i] = np.where(i < number, pair[1], SumsTokenizer.eos)
    return rows


def _longest(config: ConfigDict) -> int:
    return min(config.seq_len - PROMPT - 1, MOST)


def describe(config: ConfigDict) -> DataInfo:
    """The questions of `config`; answers have up to seq_len - 5 digits, so that all end."""
    longest = _longest(config)
    if longest < 1:
        raise DataError(
            f"data.seq_len is {config.seq_len}; rows of sums have at least {PROMPT + 2} symbols."
        )
    if not 1 <= config.eval_rows <= 25 * longest:
        raise DataError(
            f"data.eval_rows is {config.eval_rows}; of {100 * longest} questions 1 to "
            f"{25 * longest} can be held out for each of validation and test."
        )
    tokenizer = SumsTokenizer()
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=tokenizer.vocab_size,
        unit=tokenizer.unit,
        tokenizer=tokenizer,
        entropy=np.log(100 * longest) / config.seq_len,
    )


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """All questions, shuffled once: `eval_rows` for validation, as many for test, the rest to learn
    from. Fields are `tokens` and `prompt_len`."""
    describe(config)
    total, held = 100 * _longest(config), config.eval_rows
    which = permute(np.arange(total), total, seed=config.law_seed)
    number, pair = np.divmod(which, 100)
    rows = sums(*np.divmod(pair, 10), number + 1, config.seq_len)
    parts = np.split(rows, [held, 2 * held])
    return {
        split: ArraySource(
            {"tokens": part, "prompt_len": np.full(len(part), PROMPT, np.uint16)},
            Stats(len(part), part.size),
            f"sums/{VERSION}",
        )
        for split, part in zip(("validation", "test", "train"), parts, strict=True)
    }
