"""What every sampler returns."""

import flax.struct
import jax


@flax.struct.dataclass
class Samples:
    """Generated rows.

    tokens (B, n) int32 in natural order, 0 beyond the length; lengths (B,) int32; step (B, n)
    int32, the network call at which each position was filled (-1: it was given). Where the sampler
    knows them: logp (B, n) float32, the log probability of each filled token; calls (B,) int32,
    network calls whose result a row used; widths and squares (B,) float32, the sums over those
    calls of the row's length and of its square, from which its FLOPs follow (with a cache, of the
    positions that were computed and of their product with the length). Where rows grow by
    insertion: born (B, n) int32, the call that inserted each position (-1: it was given); full (B,)
    int32, calls with insertions after which a row was at its capacity.
    """

    tokens: jax.Array
    lengths: jax.Array
    step: jax.Array
    logp: jax.Array | None = None
    calls: jax.Array | None = None
    widths: jax.Array | None = None
    squares: jax.Array | None = None
    born: jax.Array | None = None
    full: jax.Array | None = None
