"""A trained model as a measure sees it: its data, its likelihood and rows it wrote."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np
from jax.sharding import Mesh

from aodiff.config import editable
from aodiff.data import DataInfo, Source
from aodiff.data.pipeline import as_batch
from aodiff.generate import draw_rows
from aodiff.methods.aogpt import MASKED_DIFFUSION
from aodiff.methods.base import Method, Samples

# The model's own order, one token a call, sampled from its law.
EXACT = dict(
    order="own", steps=0, schedule="linear", temperature=1.0, top_p=1.0, **MASKED_DIFFUSION
)


def before_end(row: np.ndarray, end: int | None) -> np.ndarray:
    """A row of ids (n,) up to its first end symbol, if it has one."""
    ends = np.flatnonzero(row == end)
    return row[: ends[0]] if len(ends) else row


def ended(out: Samples, end: int | None) -> list[np.ndarray]:
    """Ids of each row up to its length and the first end symbol."""
    pairs = zip(out.tokens, out.lengths, strict=True)
    return [before_end(row[:length], end) for row, length in pairs]


def as_asked(config) -> dict[str, Any]:
    """The values of `config.sample`, but for the file of rows to complete."""
    return {key: value for key, value in config.sample.to_dict().items() if key != "given"}


def decoding(config, **sample) -> ml_collections.ConfigDict:
    """A copy of a config that draws `eval.batch` rows a call, with values of `config.sample`."""
    c = editable(config)
    c.sample.update(sample, batch=c.eval.batch)
    return c


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model and what a measure may ask of it.

    splits: the sources by split, in the order the model sees (hidden permutation applied).
    results: what the evaluation of this step found on `config.eval.split`, by order.
    """

    method: Method
    params: Any
    extra: Any
    info: DataInfo
    config: Any
    mesh: Mesh
    splits: dict[str, Source]
    step: int
    workdir: pathlib.Path
    results: Mapping[str, dict] = dataclasses.field(default_factory=dict)

    @property
    def own(self) -> dict:
        """The evaluation in the model's own order."""
        return self.results["own"]

    @property
    def nats_per_row(self) -> float:
        return self.own["nats_per_token"] * self.own["tokens"] / self.own["rows"]

    def complete(self, tokens: np.ndarray, given: np.ndarray, **sample) -> Samples:
        """Writes what is not given, by default in the model's own order, one token a call.

        Args:
          tokens: (num, L) ids in natural order.
          given: (num, L) bool.
          **sample: values of `config.sample` that replace that default, all of them.

        Returns:
          Samples in natural order.
        """
        c = decoding(self.config, **(sample or EXACT))
        return draw_rows(
            self.method, self.params, self.extra, self.info, c, self.mesh, tokens, given
        )

    @functools.cached_property
    def samples(self) -> Samples:
        """`config.eval.samples` rows in natural order, drawn once for all measures."""
        shape = (self.config.eval.samples, self.info.seq_len)
        return self.complete(np.zeros(shape, np.int32), np.zeros(shape, bool))

    def rows(self, split: str, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 and scored cells bool, both (rows, L) in natural order, of a split.

        At most `most` rows, far apart, for neighbours in a file may be alike.
        """
        picked = self.picked(split, most)
        batch = as_batch(self.splits[split].read(picked), picked)
        return self.info.natural(batch["tokens"]), self.info.natural(batch["loss_mask"])

    def picked(self, split: str, most: int | None = None) -> np.ndarray:
        """Numbers of at most `most` rows of a split, evenly spaced, int64."""
        length = len(self.splits[split])
        return np.linspace(0, length - 1, min(length, most or length)).astype(np.int64)
