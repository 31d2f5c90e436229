"""A law over strings of at most two letters whose hidden alignments can be counted.

Its numbers (entropy, optimum of the losses) are stated in flexmdm.md 3.6 and 15.7.
"""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np

from aodiff.nn.flexmdm import MASKED, Prediction

A, B, MASK, ANCHOR = range(4)
V = 2
LAW = {(): 0.1, (A,): 0.2, (B,): 0.1, (A, A): 0.05, (A, B): 0.35, (B, A): 0.2}
ENTROPY = 1.621517
LOSS = 2.037405  # of the paper's loss at its optimum, ENTROPY + 0.6 log 2 for any two schedules
SPLIT = {  # into unmasking and insertion, by schedules
    ("linear", "linear"): (0.737119, 1.300285),
    ("power(1.7)", "power(2.89)"): (0.740271, 1.297134),
    ("linear", "power(5)"): (0.744923, 1.292482),
}
STATES = [s for n in range(3) for s in itertools.product((A, B, MASK), repeat=n)]
CODE = {state: i for i, state in enumerate(STATES)}


def alignments(state: tuple, string: tuple):
    """Every choice of indices of `string` that reads as `state`, masks standing for anything."""
    for chosen in itertools.combinations(range(len(string)), len(state)):
        if all(s in (MASK, string[j]) for s, j in zip(state, chosen, strict=True)):
            yield chosen


def tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of alignments by state and missing tokens, weighted by the law: all (13, 3), of those
    with letter v in place i (13, 3, 2, V), and sums of their gaps (13, 3, 3)."""
    every, letters = np.zeros((13, 3)), np.zeros((13, 3, 2, V))
    gaps = np.zeros((13, 3, 3))
    for (state, code), (string, law) in itertools.product(CODE.items(), LAW.items()):
        for chosen in alignments(state, string):
            missing = len(string) - len(state)
            every[code, missing] += law
            for i, j in enumerate(chosen):
                letters[code, missing, i, string[j]] += law
            ends = (-1, *chosen, len(string))
            for i in range(len(state) + 1):
                gaps[code, missing, i] += law * (ends[i + 1] - ends[i] - 1)
    return every, letters, gaps


def posterior(alpha) -> tuple[jax.Array, jax.Array]:
    """Letters (..., 13, 2, V) and mean gaps (..., 13, 3) when the share `alpha` (...) has come.

    A state of n tokens has the factor alpha ** n of its own; (1 - alpha) ** missing tells apart.
    """
    every, letters, gaps = (jnp.asarray(x, jnp.float32) for x in tables())
    alpha = jnp.asarray(alpha, jnp.float32)
    weight = jnp.stack([(1 - alpha) ** m for m in range(3)], axis=-1)
    total = jnp.maximum(jnp.einsum("sm,...m->...s", every, weight), 1e-30)  # bb never was
    f = jnp.einsum("smiv,...m->...siv", letters, weight) / total[..., None, None]
    return f, jnp.einsum("smi,...m->...si", gaps, weight) / total[..., None]


def rows_of_states() -> tuple[jax.Array, jax.Array]:
    """Every state behind the anchor, (13, 3), and its length."""
    rows = [[ANCHOR, *s, *[0] * (2 - len(s))] for s in STATES]
    return jnp.array(rows), jnp.array([len(s) + 1 for s in STATES])


def mistakes(seed: int) -> dict[str, jax.Array]:
    """Parameters of a toy that is wrong in every state in its own way."""
    keys = jax.random.split(jax.random.key(seed))
    shapes = {"letters": (13, 2, V), "gaps": (13, 3)}
    draw = lambda key, shape: 0.4 * jax.random.normal(key, shape)
    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


@dataclasses.dataclass(frozen=True, eq=False)
class ToyInsertion:
    """What a method asks of its module: the true posterior, times exp of `wrong` on purpose, and of
    what `params` says by state of logits "letters" (13, 2, V) and logs of counts "gaps" (13, 3)."""

    wrong: tuple[float, float] = (0.0, 0.0)  # on the logits of a, on the logs of counts

    @property
    def cfg(self):
        return types.SimpleNamespace(mask=MASK, anchor=ANCHOR, vocab_size=V)

    def apply(self, params, tokens, length, cond, slots=None):
        f, gaps = posterior(cond)
        body = jnp.pad(tokens, ((0, 0), (0, 2)), constant_values=MASK)[:, 1:3]
        n = length - 1
        code = jnp.array([0, 1, 4])[n] + jnp.where(
            n == 2, 3 * body[:, 0] + body[:, 1], jnp.where(n == 1, body[:, 0], 0)
        )
        rows = jnp.arange(len(code))
        f, gaps = f[rows, code], gaps[rows, code]
        off = {name: params[name][code] if params else 0.0 for name in ("letters", "gaps")}
        wide = lambda x, before, after, fill: jnp.pad(
            x, ((0, 0), (before, after)) + ((0, 0),) * (x.ndim - 2), constant_values=fill
        )
        logits = jnp.log(jnp.maximum(f, 1e-30)) + jnp.array([self.wrong[0], 0.0])[None, None]
        logits += off["letters"]
        logits = wide(logits, 1, tokens.shape[1], MASKED)[:, : tokens.shape[1]]
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, 2)), constant_values=MASKED)
        # An exact zero would be minus infinity; it is far below any rate that matters.
        logs = jnp.log(jnp.maximum(gaps, 1e-12)) + self.wrong[1] + off["gaps"]
        logs = wide(logs, 0, tokens.shape[1], -30.0)[:, : tokens.shape[1]]
        if slots is not None:
            logits = jnp.take_along_axis(logits, slots[..., None], axis=1)
        return Prediction(logits, logs)
