"""Questions with answers of very different length: digits by a rule, as many as are asked for.

A row is "3817e=" and then as many digits as the letter says (a 1, b 2, ... z 26, A 27, ... Z 52),
each the digit four before it, plus 3 where the digit right before it is 5 or more, without carry
(3 + 3, 8 + 3, 1, 7, 6 + 3: 61179), then the end symbol up to the length of the row. So the question
says how long the answer is, and its digits are found one by one: every row of four digits has one
successor and one predecessor, and far digits look random from where they start.
"""

import dataclasses
import functools
import string

import numpy as np
from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo
from aodiff.data.pipeline import permute
from aodiff.data.sources import GeneratedSource, Source
from aodiff.data.tokenizers import SymbolsTokenizer

VERSION = 1
SEEDS = 4  # digits that a question begins with
PROMPT = SEEDS + 2  # and a letter, and "="
MOST = len(string.ascii_letters)


@dataclasses.dataclass(frozen=True)
class SumsTokenizer(SymbolsTokenizer):
    """Digits, "=", letters, and the end, which is shown as nothing."""

    spec: str = f"symbols:{string.digits}={string.ascii_letters}."
    eos: int = 11 + MOST

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return super().decode(ids[ids != self.eos])


def sums(questions: np.ndarray, longest: int, seq_len: int) -> np.ndarray:
    """Rows (N, seq_len) uint16 of questions (N,) int64.

    Question q begins with the last digits of q and asks for q // 10^4 + 1 more, at most `longest`.
    """
    number, start = np.divmod(questions, 10**SEEDS)
    digits = [start // 10**i % 10 for i in range(SEEDS)]
    rows = np.full((len(questions), seq_len), SumsTokenizer.eos, np.uint16)
    rows[:, :PROMPT] = np.stack([*digits, number + 11, np.full(len(rows), 10)], axis=1)
    for i in range(longest):
        digits.append((digits[-SEEDS] + np.where(digits[-1] >= 5, 3, 0)) % 10)
        rows[:, PROMPT + i] = np.where(i <= number, digits[-1], SumsTokenizer.eos)
    return rows


def _longest(config: ConfigDict) -> int:
    return min(config.seq_len - PROMPT - 1, MOST)


def _total(config: ConfigDict) -> int:
    return _longest(config) * 10**SEEDS


def describe(config: ConfigDict) -> DataInfo:
    """The questions of `config`; answers are shorter than a row, so that all end."""
    if _longest(config) < 1:
        raise DataError(
            f"data.seq_len is {config.seq_len}; rows of sums have at least {PROMPT + 2} symbols."
        )
    total = _total(config)
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


@dataclasses.dataclass(frozen=True, eq=False)
class SumsSource(GeneratedSource):
    """Rows with `prompt_len`, the symbols of the question."""

    fields: tuple[str, ...] = ("tokens", "prompt_len")

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return super().read(rows) | {"prompt_len": np.full(len(rows), PROMPT, np.uint16)}


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """No question is in two splits: all are shuffled once, by `law_seed`, and dealt out.

    Training gets what is left, at most `train_rows`.
    """
    describe(config)
    held, total = config.eval_rows, _total(config)
    train = min(config.train_rows, total - 2 * held)
    spans = {"validation": (0, held), "test": (held, held), "train": (2 * held, train)}
    sample = functools.partial(_sample, total, config.law_seed, config.seq_len)
    law = f"sums/{VERSION} ({total}, {config.law_seed}, {config.seq_len})"
    return {
        split: SumsSource(sample, start, length, config.seq_len, law)
        for split, (start, length) in spans.items()
    }


def _sample(total: int, seed: int, seq_len: int, rows: np.ndarray) -> np.ndarray:
    return sums(permute(rows, total, seed), total // 10**SEEDS, seq_len)
