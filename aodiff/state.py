"""The training state: abstract first, then born sharded, so that it never exists on one device."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from aodiff import partitioning, rng
from aodiff.methods.base import Method, Params


@flax.struct.dataclass
class TrainState:
    """Everything a run needs to continue, as global arrays.

    Attributes:
      step: int32 scalar, number of updates made (skipped ones included).
      params: float32 parameters without logical names.
      ema_params: their exponential moving average, or None.
      opt_state: of the optax optimizer.
      extra: the method's own non-trained state.
    """

    step: jax.Array
    params: Params
    ema_params: Params | None
    opt_state: Any
    extra: Any


def abstract_params(method: Method) -> Params:
    """Shapes of the parameters, still boxed with their logical names. Call it outside any mesh."""
    return jax.eval_shape(lambda: method.init(rng.stream(0, rng.INIT)))


def create(
    method: Method, tx: optax.GradientTransformation, ema: bool, seed: int | jax.Array, extra: Any
) -> TrainState:
    """The boxed initial state; only ever traced."""
    params = method.init(rng.stream(seed, rng.INIT))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        ema_params=params if ema else None,
        opt_state=tx.init(params),
        extra=jax.tree.map(jnp.asarray, extra),
    )


def abstract_state(
    method: Method, tx: optax.GradientTransformation, ema: bool, mesh: Mesh
) -> TrainState:
    """The state as `ShapeDtypeStruct`s with shardings; init, restore and compile check use it."""
    boxed = jax.eval_shape(lambda: create(method, tx, ema, 0, method.init_extra()))
    shardings = partitioning.param_shardings(boxed, mesh)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        partitioning.unbox(boxed),
        shardings,
    )


def init_state(
    method: Method, tx: optax.GradientTransformation, ema: bool, abstract: TrainState, seed: int
) -> TrainState:
    """The concrete initial state with the shardings of `abstract`. Call it outside any mesh.

    The seed is an argument of the compiled program and `extra` is made by one of its own, so that
    runs of other seeds share the former.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract)

    def build(seed: jax.Array) -> TrainState:
        return partitioning.unbox(create(method, tx, ema, seed, {}))

    start = jax.jit(build, out_shardings=shardings.replace(extra={}))(np.uint32(seed))
    extra = lambda: partitioning.unbox(method.init_extra())
    return start.replace(extra=jax.jit(extra, out_shardings=shardings.extra)())
