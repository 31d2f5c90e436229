"""Generative perplexity: samples of a run as a run that reads from left to right finds them.

  python -m aodiff.tools.perplexity --samples=runs/flexmdm/samples/1500.jsonl --scorer=RUN_AR

The scorer is a run of aogpt with method.order="l2r" on the same tokens, such as the arm "ar" of a
run. All samples count, of any length; the mean over samples is ruled by short ones, the value of
the corpus is not. Low entropy with low perplexity means repetition, not quality. Source: the
perplexity protocol of MDLM (Sahoo et al. 2024), and Kim et al. 2025 without their length filter.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_collections
import numpy as np
from scipy.stats import entropy

from aodiff import data
from aodiff.config import ConfigError
from aodiff.data import DataError
from aodiff.data.pipeline import as_batch
from aodiff.data.tokenizers import Tokenizer
from aodiff.evals.problems import mean_and_error, read_rows
from aodiff.evals.trained import before_end
from aodiff.evaluate import make_scorers
from aodiff.main import SENTENCES
from aodiff.tools.runs import Run, open_run


@dataclasses.dataclass(frozen=True)
class Found:
    """What a scorer finds of samples: (mean, standard error) over samples of exp(mean nats a token)
    and of the entropy in bits of the tokens within one, and the perplexity of all tokens."""

    samples: int
    empty: int
    tokens: int
    per_sample: tuple[float, float]
    corpus: float
    entropy_bits: tuple[float, float]

    def __str__(self) -> str:
        spread = lambda pair: f"{pair[0]:.3f} +- {pair[1]:.3f}"
        return (
            f"{self.samples} samples, {self.tokens} tokens, {self.empty} samples empty and left "
            f"out\nperplexity, mean over samples: {spread(self.per_sample)}\n"
            f"perplexity of all tokens:      {self.corpus:.3f}\n"
            f"entropy of tokens, bits:       {spread(self.entropy_bits)}"
        )


def read_samples(path: Path, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Ids of the samples that a run wrote, each up to its length and the first end symbol.

    Raises:
      DataError: no samples of a run, or of one with another tokenizer than `tokenizer`.
    """
    record = path.resolve().parent.parent / "config.json"
    if not record.is_file():
        raise DataError(
            f"--samples={path} lies in the folder of no run, so its tokens are unknown; name "
            "samples/STEP.jsonl of the workdir of one"
        )
    theirs = data.describe(ml_collections.ConfigDict(json.loads(record.read_text())["data"]))
    if theirs.tokenizer is None or theirs.tokenizer.fingerprint != tokenizer.fingerprint:
        spec = theirs.tokenizer and theirs.tokenizer.spec
        raise DataError(
            f"--samples={path} are of tokenizer {spec} and the scorer is of {tokenizer.spec}, "
            "to which its tokens mean nothing; name a scorer of the same tokenizer"
        )
    found = []
    for row in read_rows(path, ("tokens",)):
        ids = np.array(row["tokens"][: row.get("length")], np.int32)
        found.append(before_end(ids, tokenizer.eos))
    return found


def score(run: Run, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Nats of each row (rows,) float64, its tokens from left to right, without an end.

    Raises:
      ConfigError, DataError: the run does not read from left to right, or a row is too long for it.
    """
    setup = run.setup
    config, n = setup.config, setup.info.seq_len
    if config.method.name != "aogpt" or config.method.order != "l2r":
        raise ConfigError(
            f"--scorer={run.workdir} is a run of {config.method.name} of order "
            f"{config.method.get('order', 'any')}; name one of aogpt with method.order='l2r'"
        )
    if too_long := [len(row) for row in rows if len(row) > n]:
        raise DataError(
            f"a sample has {max(too_long)} tokens and --scorer={run.workdir} reads {n}; name a "
            "scorer with a data.seq_len of as many"
        )
    tokens, length = np.zeros((len(rows), n), np.int32), np.array([len(row) for row in rows])
    for to, row in zip(tokens, rows, strict=True):
        to[: len(row)] = row
    asked = ml_collections.ConfigDict(config).copy_and_resolve_references()
    asked.eval.update(orders=("own",), ensemble=0, marginal=0)
    scorer = make_scorers(setup.method, asked, setup.mesh)["own"][1]
    batch, nats = config.eval.batch, []
    for start in range(0, len(rows), batch):
        at = np.minimum(np.arange(start, start + batch), len(rows) - 1)
        fields = {"tokens": tokens[at], "length": length[at]}
        with jax.set_mesh(setup.mesh):
            scores, _, _ = jax.device_get(scorer(run.params, as_batch(fields, at), run.extra))
        nats.append(scores.nll.astype(np.float64))
    return np.concatenate(nats)[: len(rows)]


def perplexity(run: Run, rows: Sequence[np.ndarray]) -> Found:
    """The perplexity and entropy of samples; raises DataError if all are empty, and as `score`."""
    full = [row for row in rows if len(row)]
    if not full:
        raise DataError(f"all {len(rows)} samples are empty; there is nothing to score")
    nats, lengths = score(run, full), np.array([len(row) for row in full])
    return Found(
        len(rows),
        len(rows) - len(full),
        int(lengths.sum()),
        mean_and_error(np.exp(nats / lengths)),
        float(np.exp(nats.sum() / lengths.sum())),
        mean_and_error([entropy(np.bincount(row), base=2) for row in full]),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m aodiff.tools.perplexity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--samples", type=Path, required=True, help="samples/STEP.jsonl of a run")
    parser.add_argument("--scorer", type=Path, required=True, help="the workdir of a run")
    args = parser.parse_args(argv)
    try:
        scorer = open_run(args.scorer, "--scorer")
        if scorer.setup.info.tokenizer is None:
            raise DataError(f"--scorer={args.scorer} reads no text; name a run on text")
        print(perplexity(scorer, read_samples(args.samples, scorer.setup.info.tokenizer)))
    except (*SENTENCES, ValueError, OSError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
