"""A trained model as a measure sees it: its data, its likelihood and rows it wrote."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np
from jax.sharding import Mesh

from aodiff.data import DataInfo, Source
from aodiff.data.pipeline import as_batch
from aodiff.generate import draw_rows
from aodiff.methods.base import Method, Samples


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

    def complete(self, tokens: np.ndarray, given: np.ndarray) -> Samples:
        """Writes what is not given in the model's own order, one token a call.

        Args:
          tokens: (num, L) ids in natural order.
          given: (num, L) bool.

        Returns:
          Samples in natural order.
        """
        c = ml_collections.ConfigDict(self.config).copy_and_resolve_references().unlock()
        exact = dict(order="own", steps=0, schedule="linear", block=0, temperature=1.0, top_p=1.0)
        c.sample.update(exact, batch=c.eval.batch)
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

        At most `most` rows, evenly spaced, for neighbours in a file may be alike.
        """
        source = self.splits[split]
        num = min(len(source), most or len(source))
        picked = np.linspace(0, len(source) - 1, num).astype(np.int64)
        batch = as_batch(source.read(picked), picked)
        return self.info.natural(batch["tokens"]), self.info.natural(batch["loss_mask"])
