"""What a method is: a frozen dataclass of hyper-parameters and modules with pure functions.

A training step is `draw` (everything random, for the global batch), then `loss_fn` (deterministic)
on each microbatch. Splitting a batch therefore cannot change its noise, and a test can call
`loss_fn` with noise of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from aodiff.metrics import Mean, Sum
from aodiff.sampling.samples import Samples

Batch = dict[str, jax.Array]  # every array has the batch as its first dimension
Params = Any


@flax.struct.dataclass
class LossOutput:
    """Loss in nats with total and count apart; metrics by name, reduced the same way."""

    loss: Mean
    metrics: dict[str, Mean | Sum]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One number of a likelihood evaluation.

    fn(params, batch, key, extra) -> Scores. `key` is the evaluation stream; per-row keys fold in
    `batch["example_id"]`. `estimator` says in words what the number is, beginning with "exact" or
    "upper bound".
    """

    fn: Callable[[Params, Batch, jax.Array, Any], "Scores"]
    estimator: str


@flax.struct.dataclass
class Scores:
    """nll (B,) float32 nats summed over the scored tokens of each row, count (B,) float32 scored
    tokens, and curves: accumulators with array totals and counts, summed over rows."""

    nll: jax.Array
    count: jax.Array
    curves: dict[str, Mean]


def token_rows(global_batch: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch of a method that learns from rows of tokens (B, L), scored where `loss_mask`.

    `given` tokens are known and not scored (a prompt, the clues of a puzzle); what is neither is
    missing. From `length` (B,) on a row is padding.
    """
    rows = (global_batch, seq_len)
    return {
        "tokens": jax.ShapeDtypeStruct(rows, jnp.int32),
        "loss_mask": jax.ShapeDtypeStruct(rows, jnp.bool_),
        "given": jax.ShapeDtypeStruct(rows, jnp.bool_),
        "length": jax.ShapeDtypeStruct((global_batch,), jnp.int32),
        "example_id": jax.ShapeDtypeStruct((global_batch,), jnp.int32),
    }


class Method(Protocol):
    """What a paper offers to the loop, the evaluator, the generator and the compile check."""

    refresh_every: int  # 0: `refresh` is never called

    def batch_spec(self, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What the pipeline must deliver."""

    def init(self, key: jax.Array) -> Params:
        """Parameters boxed with logical axes; only ever called under `jit` or `eval_shape`."""

    def init_extra(self) -> Any:
        """The method's own non-trained state, a pytree of arrays ({} for most methods)."""

    def draw(
        self, key: jax.Array, batch: Batch, step: jax.Array, params: Params, extra: Any
    ) -> tuple[Batch, Any]:
        """Adds everything random (orders, times, masks) to the global batch.

        Returns the drawn batch and `extra` as the next step finds it. No gradient passes here.
        """

    def loss_fn(self, params: Params, batch: Batch) -> LossOutput:
        """The training loss of a drawn batch; deterministic."""

    def refresh(
        self, params: Params, batch: Batch, key: jax.Array, step: int, extra: Any
    ) -> tuple[Any, dict[str, float]]:
        """Host-side update of `extra` between steps, and scalars to log."""

    def evaluations(self, config) -> dict[str, Evaluation]:
        """Likelihood evaluations by name, chosen by `config.eval`."""

    def sampler(self, config, max_given: int) -> Callable[..., Samples]:
        """fn(params, extra, keys (B,), tokens (B, n), given (B, n) bool) -> Samples; jit-able.
        `max_given` is the largest number of given positions in a row."""

    def flops_per_token(self) -> float:
        """Analytic FLOPs of one forward, 2 per multiply-add, attention by mask density."""
