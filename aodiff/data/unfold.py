"""Questions with answers of very different length: digits by a rule, until the rule ends them.

A row is "3817=" and then digits, each the digit four before it plus half of the digit right before
it, rounded down, without carry (3 + 3, 8 + 3, 1 + 0, 7 + 0, 6 + 3, ... make "61179..."). A 0 ends
the answer, and what is left of the row holds the end symbol. Four digits have one successor and one
predecessor, so that far digits look random from the question, and nothing but working it out says
how long an answer is: 1 to 42 digits in rows of 48.
"""

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.sources import ArraySource, Source
from aodiff.data.tokenizers import SymbolsTokenizer

VERSION = 1
SEEDS = 4  # digits of a question
PROMPT = SEEDS + 1  # and "="


@dataclasses.dataclass(frozen=True)
class UnfoldTokenizer(SymbolsTokenizer):
    """Digits, "=", and the end, which is shown as nothing."""

    spec: str = "symbols:0123456789=."
    eos: int = 11

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return super().decode(ids[ids != self.eos])


def unfolded(seq_len: int) -> np.ndarray:
    """All rows (N, seq_len) uint16 that hold answer and end symbol, in order of questions."""
    end = UnfoldTokenizer.eos
    questions = np.arange(10**SEEDS)
    digits = [questions // 10**i % 10 for i in reversed(range(SEEDS))]
    rows = np.full((len(questions), seq_len), end, np.uint16)
    rows[:, :PROMPT] = np.stack([*digits, np.full(len(rows), 10)], axis=1)
    ended = np.zeros(len(rows), bool)
    for i in range(PROMPT, seq_len - 1):
        digits.append((digits[-SEEDS] + digits[-1] // 2) % 10)
        rows[:, i] = np.where(ended, end, digits[-1])
        ended |= digits[-1] == 0
    return rows[ended]


def describe(config: ConfigDict) -> DataInfo:
    """The questions of `config`, which are those with an answer shorter than a row."""
    if config.seq_len < PROMPT + 2:
        raise DataError(
            f"data.seq_len is {config.seq_len}; rows of unfold have at least {PROMPT + 2} symbols."
        )
    total = len(unfolded(config.seq_len))
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
    to learn from. Fields are `tokens` and `prompt_len`."""
    describe(config)
    rows = unfolded(config.seq_len)
    rows = rows[permute(np.arange(len(rows)), len(rows), config.law_seed)]
    parts = np.split(rows, [config.eval_rows, 2 * config.eval_rows])
    return {
        split: ArraySource(
            {"tokens": part, "prompt_len": np.full(len(part), PROMPT, np.uint16)},
            Stats(len(part), part.size),
            f"unfold/{VERSION}",
        )
        for split, part in zip(("validation", "test", "train"), parts, strict=True)
    }
