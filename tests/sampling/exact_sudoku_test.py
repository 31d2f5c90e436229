"""Every decoder with the exact conditionals of 4x4 Sudoku, from the list of all 288 grids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff.data import sudoku
from aodiff.data.puzzles import unique_clues
from aodiff.sampling.denoise import Decoder, decode

GRIDS = sudoku.all_small_grids().astype(np.int32)
MASK = 4


def exact(tokens, length):
    """Log probabilities (B, 16, 5) of each cell, given the cells that are not masked."""
    agrees = jnp.all((tokens[:, None] == MASK) | (tokens[:, None] == GRIDS[None]), axis=2)
    counts = jnp.einsum(
        "bg,gnv->bnv", agrees.astype(jnp.float32), np.eye(5, dtype=np.float32)[GRIDS]
    )
    return jnp.where(counts > 0, jnp.log(counts), -1e9)


@functools.cache
def solver(score, temperature, **options):
    decoder = Decoder(score, **{"schedule": "linear", "steps": 16} | options)
    rest = dict(mask_id=MASK, temperature=temperature)
    return jax.jit(lambda *args: decode(exact, *args, decoder, **rest))


@pytest.mark.parametrize("score", ["random", "l2r", "confidence", "margin", "entropy"])
def test_every_decoder_solves_every_puzzle_of_one_solution(score):
    draws = np.random.default_rng(0)
    orders = [tuple(draws.permutation(16).tolist()) for _ in GRIDS]
    given = np.array(
        [unique_clues(tuple(g), o, 4) for g, o in zip(GRIDS.tolist(), orders, strict=True)]
    )
    out = solver(score, 0.0)(jax.random.split(jax.random.key(0), 288), GRIDS, given)
    assert given.sum(axis=1).min() == 4
    np.testing.assert_array_equal(out.tokens, GRIDS)
    np.testing.assert_array_equal(out.calls, 16 - given.sum(axis=1))
    np.testing.assert_allclose(np.where(given, 0, out.logp), 0, atol=1e-5)


@pytest.mark.parametrize("score", ["random", "l2r", "max_prob", "entropy"])
def test_one_cell_a_call_draws_all_completions_alike(score):
    """The first row is given: 12 completions."""
    given = np.zeros((3000, 16), bool)
    given[:, :4] = True
    tokens = np.repeat(GRIDS[:1], 3000, axis=0)
    out = solver(score, 1.0)(jax.random.split(jax.random.key(1), 3000), tokens, given)
    completions = GRIDS[(GRIDS[:, :4] == GRIDS[0, :4]).all(axis=1)]
    found = (np.asarray(out.tokens)[:, None] == completions[None]).all(axis=2)
    assert len(completions) == 12 and found.any(axis=1).all()
    assert scipy.stats.chisquare(found.sum(axis=0)).pvalue > 1e-4


def test_all_cells_at_once_break_the_rules():
    """What a product of exact marginals is worth: the test above can fail."""
    given = np.zeros((200, 16), bool)
    keys = jax.random.split(jax.random.key(2), 200)
    out = solver("random", 1.0, steps=1)(keys, np.zeros((200, 16), np.int32), given)
    assert sudoku.valid(np.asarray(out.tokens)).mean() < 0.05
