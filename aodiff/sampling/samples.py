"""What every sampler returns."""

import flax.struct
import jax


@flax.struct.dataclass
class Samples:
    """Generated rows.

    tokens (B, n) int32 in natural order; lengths (B,) int32; step (B, n) int32, the network call at
    which each position was filled (-1: it was given).
    """

    tokens: jax.Array
    lengths: jax.Array
    step: jax.Array
