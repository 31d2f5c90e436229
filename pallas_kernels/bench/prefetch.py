"""What a program hands its kernels by scalar prefetch, found by evaluating everything around them.

Kernels themselves are not run: their results are taken as zeros, which no table may depend on.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"}


def tables(program: core.ClosedJaxpr, arguments: list[Any]) -> list[tuple[str, list[np.ndarray]]]:
    """Returns (name, prefetched arrays) of every pallas_call, in program order.

    Args:
      program: a traced function.
      arguments: its flat arguments; a jax.ShapeDtypeStruct stands for zeros.
    """
    found: list[tuple[str, list[np.ndarray]]] = []
    values = [
        jnp.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else jnp.asarray(a)
        for a in arguments
    ]
    _evaluate(program.jaxpr, program.consts, values, found)
    return found


def _evaluate(jaxpr: core.Jaxpr, consts: list[Any], values: list[Any], found: list) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    read = lambda v: v.val if isinstance(v, core.Literal) else known[v]
    for eqn in jaxpr.eqns:
        inputs, name = [read(v) for v in eqn.invars], eqn.primitive.name
        if name == "pallas_call":
            count = eqn.params["grid_mapping"].num_index_operands
            found.append((eqn.params["name"], [np.asarray(x) for x in inputs[:count]]))
            outputs = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        elif name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            closed = isinstance(inner, core.ClosedJaxpr)
            body, constants = (inner.jaxpr, inner.consts) if closed else (inner, [])
            outputs = _evaluate(body, constants, inputs, found)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            with eqn.ctx.manager:
                outputs = eqn.primitive.bind(*inputs, **params)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]
