"""Streams of a causal mask as query heads of a plainly causal call, so that any kernel serves them.

Row i of a strict stream sees keys < i. One row up it stands in row i - 1, where it sees keys
<= i - 1: plain causal (kernels.md section 5.3).
"""

import jax
import jax.numpy as jnp


def roll_up(x: jax.Array, strict: tuple[bool, ...]) -> jax.Array:
    """(B, H, S, L, ...) to (B, H * S, L, ...): strict streams lose row 0 and end in a row of zeros.

    Zeros, and not row 0 rolled around: the row they fill sees keys, so a query or a cotangent there
    would leak into gradients.
    """
    streams = [
        jnp.concatenate([x[:, :, s, 1:], jnp.zeros_like(x[:, :, s, :1])], axis=2)
        if up
        else x[:, :, s]
        for s, up in enumerate(strict)
    ]
    x = jnp.stack(streams, axis=2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def roll_down(x: jax.Array, strict: tuple[bool, ...], dead: float = 0.0) -> jax.Array:
    """The inverse, (B, H * S, L, ...) to (B, H, S, L, ...): row 0 of strict streams is `dead`."""
    x = x.reshape(x.shape[0], -1, len(strict), *x.shape[2:])
    streams = [
        jnp.concatenate([jnp.full_like(x[:, :, s, :1], dead), x[:, :, s, :-1]], axis=2)
        if up
        else x[:, :, s]
        for s, up in enumerate(strict)
    ]
    return jnp.stack(streams, axis=2)
