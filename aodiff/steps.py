"""The pure training step: draw noise, accumulate gradients exactly, update, average."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aodiff import partitioning, rng
from aodiff.methods.base import Batch, LossOutput, Method, Params
from aodiff.metrics import Mean, Sum, merge
from aodiff.state import TrainState

TrainStep = Callable[[TrainState, Batch, jax.Array], tuple[TrainState, dict[str, Mean | Sum]]]


def make_train_step(
    method: Method, tx: optax.GradientTransformation, microbatches: int, ema_decay: float
) -> TrainStep:
    """Returns train_step(state, batch, seed uint32 scalar) -> (state, metrics).

    Metrics are `loss` (nats), the method's own, `grad_norm` before clipping, `learning_rate` and
    `nonfinite` (1 where the update was skipped).

    Args:
      method: loss and noise.
      tx: the optimizer; it must skip non-finite gradients itself.
      microbatches: M, parts the global batch is processed in.
      ema_decay: of the parameter average; 0 when the state has none.
    """

    def train_step(state: TrainState, batch: Batch, seed: jax.Array):
        key = rng.stream(seed, rng.TRAIN, state.step)
        batch, extra = method.draw(key, batch, state.step, state.params, state.extra)
        grads, out = accumulate(method, state.params, batch, microbatches)
        grads = jax.tree.map(lambda g: g / jnp.maximum(out.loss.count, 1.0), grads)
        grad_norm = optax.tree.norm(grads)
        skipped = ~(jnp.isfinite(grad_norm) & jnp.isfinite(out.loss.total))
        # A norm can overflow while every element is finite: the optimizer must skip then, too.
        grads = jax.tree.map(lambda g: jnp.where(skipped, jnp.nan, g), grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = out.metrics | {
            "loss": out.loss,
            "grad_norm": Mean(grad_norm, jnp.float32(1)),
            "nonfinite": Sum(skipped.astype(jnp.float32)),
        }
        rate = optax.tree.get(
            opt_state, "learning_rate", filtering=lambda _, value: isinstance(value, jax.Array)
        )
        if rate is not None:
            metrics["learning_rate"] = Mean(rate.astype(jnp.float32), jnp.float32(1))
        ema_params = state.ema_params
        if ema_params is not None:
            ema_params = update_ema(ema_params, params, ema_decay, state.step + 1, skipped)
        return TrainState(state.step + 1, params, ema_params, opt_state, extra), metrics

    return train_step


def accumulate(
    method: Method, params: Params, batch: Batch, microbatches: int
) -> tuple[Params, LossOutput]:
    """Gradient of the loss total (not yet divided) and the loss output, summed over microbatches.

    Microbatch m holds rows m, m + M, m + 2M, ...: strided, because contiguous blocks of a sharded
    batch would have to be gathered on every device.
    """

    def total(params: Params, batch: Batch) -> tuple[jax.Array, LossOutput]:
        out = method.loss_fn(params, batch)
        return out.loss.total, out

    def grad(batch: Batch) -> tuple[Params, LossOutput]:
        grads, out = jax.grad(total, has_aux=True)(params, batch)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), out

    if microbatches == 1:
        return grad(batch)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)

    def add(sums, batch: Batch):
        grads, out = grad(batch)
        return (jax.tree.map(jnp.add, sums[0], grads), merge(sums[1], out)), None

    batches = jax.tree.map(split, batch)
    shapes = jax.eval_shape(lambda b: grad(jax.tree.map(lambda x: x[0], b)), batches)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, batches)[0]


def update_ema(ema: Params, params: Params, decay: float, count: jax.Array, skipped: Any) -> Params:
    """ema + (1 - d) (params - ema), d = min(decay, (1 + count) / (10 + count)); skipped: ema.

    Args:
      count: number of updates made, 1 at the first.
    """
    warm = jnp.minimum(decay, (1.0 + count) / (10.0 + count))
    return jax.tree.map(lambda e, p: jnp.where(skipped, e, e + (1.0 - warm) * (p - e)), ema, params)


def compile_train_step(
    train_step: TrainStep, abstract: TrainState, batch_spec: dict, mesh: Mesh
) -> jax.stages.Compiled:
    """Compiles `train_step` for the mesh with explicit shardings; the state is donated.

    Args:
      abstract: from `aodiff.state.abstract_state`, with shardings.
      batch_spec: from `Method.batch_spec`.
      mesh: the mesh of `abstract`.
    """
    return lower_train_step(train_step, abstract, batch_spec, mesh).compile()


def lower_train_step(
    train_step: TrainStep, abstract: TrainState, batch_spec: dict, mesh: Mesh
) -> jax.stages.Lowered:
    """Lowers `train_step` without creating any array; see `compile_train_step`."""
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = partitioning.batch_sharding(mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    with jax.set_mesh(mesh):
        return jax.jit(
            train_step,
            in_shardings=(shardings, rows, replicated),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        ).lower(abstract, batch_spec, jax.ShapeDtypeStruct((), jnp.uint32))
