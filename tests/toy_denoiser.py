"""A joint law of three symbols whose conditionals are known, exact or corrupted on purpose.

Its numbers (entropy, bounds, orders) are stated in decoding.md 10.4.
"""

import dataclasses
import itertools
import types

import jax.numpy as jnp
import numpy as np

N = V = 3
MASK = 3
ROWS = np.array(list(itertools.product(range(V), repeat=N)))
ENTROPY = 2.980087
# L_SAS of an order for the corrupted denoiser (strength 1); the uniform one is the MDM bound.
IN_ORDER = {"l2r": 3.438016, "reverse": 3.260498}
IN_ORDER |= dict.fromkeys(("max_prob", "margin", "entropy"), 3.728278)
BOUND = {0.0: 2.980087, 1.0: 3.542255}
KL = {0.0: 0.0, 1.0: 0.101302}  # of the mixture of all orders
TOTAL_CORRELATION = 0.270311


def joint() -> np.ndarray:
    """(27,) probabilities of `ROWS`."""
    a, b, c = ROWS.T
    log = 1.5 * (a == b) + 1.0 * (b == c) - 0.8 * (a == c) + 0.5 * (a == 0) + 0.25 * (c == 1)
    return np.exp(log) / np.exp(log).sum()


def conditionals(strength: float) -> np.ndarray:
    """(4, 4, 4, N, V + 1) log probabilities by state, symbol 3 for masked positions."""
    law, table = joint(), np.full((V + 1,) * N + (N, V + 1), -1e9)
    for state in itertools.product(range(V + 1), repeat=N):
        agrees = np.all((np.array(state) == MASK) | (ROWS == state), axis=1)
        code = sum((j + 1) * (s + 1) for j, s in enumerate(state) if s != MASK)
        for i in range(N):
            mass = np.bincount(ROWS[agrees, i], law[agrees], minlength=V) + 1e-300
            logit = np.log(mass) + strength * np.cos(1 + 2 * i + 3 * np.arange(V) + 5 * code)
            table[state][i, :V] = logit - np.log(np.exp(logit - logit.max()).sum()) - logit.max()
    return table


@dataclasses.dataclass(frozen=True, eq=False)
class ToyDenoiser:
    """What a method asks of its module; `params` are ignored."""

    strength: float

    @property
    def cfg(self):
        return types.SimpleNamespace(mask=MASK, seq_len=N)

    def apply(self, params, tokens, segments=None):
        table = jnp.asarray(np.maximum(conditionals(self.strength), -1e9), jnp.float32)
        return table[tokens[:, 0], tokens[:, 1], tokens[:, 2]]
