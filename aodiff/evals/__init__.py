"""What can be measured of a trained model beside its likelihood, by name."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from aodiff.data import DataInfo, Source
from aodiff.methods.base import Method


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model and what a measure may ask of it.

    splits: the sources by split, in the order the model sees (hidden permutation applied).
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


# Each returns named numbers and may write figures to `workdir`; chosen by `config.eval.measures`.
MEASURES: dict[str, Callable[[Trained], dict[str, float]]] = {}
