"""What every sampler returns."""

import flax.struct
import jax


@flax.struct.dataclass
class Samples:
    """Generated rows.

    tokens (B, n) int32 in natural order; lengths (B,) int32; step (B, n) int32, the network call at
    which each position was filled (-1: it was given). Where the sampler knows them: logp (B, n)
    float32, the log probability of each filled token, and calls (B,) int32, network calls.
    """

    tokens: jax.Array
    lengths: jax.Array
    step: jax.Array
    logp: jax.Array | None = None
    calls: jax.Array | None = None
