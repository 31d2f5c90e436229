"""Order distributions: valid permutations, exact patterns, mixture frequencies, counting."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core import orders

N = 9
SPECS = ["uniform", "l2r", "mix(0.5)", "fixed(3)", "block_fixed(4)", "block_random(4)", "pool(3)"]
SPECS += ["linear_curriculum", "linear_from(0.2)", "anneal_to_l2r(2,8)", "fractal", "reverse"]
SPECS += ["anneal_to_fixed(3,0.2,0.8)"]
SPECS += ["strided(2)"]
DRAWS = 600


def draw(spec, step=5, n=N, rows=slice(0, DRAWS)):
    """Orders of some of the rows of one global batch."""
    ids = jnp.arange(rows.start, rows.stop)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(7), i))(ids)
    return np.asarray(orders.make_order_fn(spec, n, 10)(keys, step))


@pytest.mark.parametrize("spec", SPECS)
def test_every_row_is_a_permutation_that_depends_on_its_key_alone(spec):
    order = draw(spec)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(N), (DRAWS, 1)))
    np.testing.assert_array_equal(order[3:7], draw(spec, rows=slice(3, 7)))


def test_patterns():
    assert draw("l2r")[0].tolist() == list(range(N))
    assert draw("reverse")[0].tolist() == list(range(N))[::-1]
    assert draw("block_fixed(4)")[0].tolist() == [0, 2, 3, 1, 4, 6, 7, 5, 8]
    assert draw("strided(2)")[0].tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7]
    assert draw("fractal", n=7)[0].tolist() == [3, 1, 5, 0, 2, 4, 6]
    assert (draw("fixed(3)") == draw("fixed(3)")[0]).all()
    assert (draw("fixed(3)")[0] != draw("fixed(4)")[0]).any()
    assert len(np.unique(draw("pool(3)"), axis=0)) == 3
    block = draw("block_random(4)")
    assert (block // 4 == np.arange(N) // 4).all() and len(np.unique(block, axis=0)) > 100


def test_uniform_covers_all_permutations_equally():
    order = draw("uniform", n=4, rows=slice(0, 2400))
    counts = [(order == np.array(p)).all(1).sum() for p in itertools.permutations(range(4))]
    assert sum((c - 100) ** 2 / 100 for c in counts) < 49.7  # chi-square, 23 dof, p = 0.001


@pytest.mark.parametrize(
    ("spec", "step", "uniform"),
    [
        ("mix(0)", 0, 1.0),
        ("mix(1)", 0, 0.0),
        ("mix(0.1)", 0, 0.9),
        ("linear_curriculum", 0, 0.0),
        ("linear_curriculum", 5, 0.5),
        ("linear_from(0.2)", 5, 0.6),
        ("linear_from(0.2)", 10, 1.0),
        ("anneal_to_l2r(2,8)", 2, 1.0),
        ("anneal_to_l2r(2,8)", 5, 0.5),
        ("anneal_to_l2r(2,8)", 9, 0.0),
        ("anneal_to_fixed(3,0.2,0.8)", 2, 1.0),
        ("anneal_to_fixed(3,0.2,0.8)", 5, 0.5),
        ("anneal_to_fixed(3,0.2,0.8)", 8, 0.0),
    ],
)
def test_share_of_uniform_orders(spec, step, uniform):
    other = draw("fixed(3)")[0] if "fixed" in spec else np.arange(N)
    share = (draw(spec, step) != other).any(axis=1).mean()
    bound = 4 * np.sqrt(uniform * (1 - uniform) / DRAWS) + 1e-4  # 1/9! are l2r by chance
    assert abs(share - uniform) <= bound


def test_file_and_refusals(tmp_path):
    path = tmp_path / "order.json"
    path.write_text(json.dumps([2, 0, 1]))
    assert draw(f"file({path})", n=3)[0].tolist() == [2, 0, 1]
    for text in ("[2, 0, 2]", "[2, 0]", "[2, 0, 1", "[[2], 0, 1]", "[2, 0, 1.5]", '{"0": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="no permutation"):
            draw(f"file({path})", n=3)
    with pytest.raises(ValueError, match="uniform"):
        draw("unifrom")
    wrong = ["mix", "mix(a)", "uniform(3)", "mix(2)", "anneal_to_l2r(3,3)", "block_fixed(3)"]
    for spec in [*wrong, "anneal_to_fixed(1,0.5,0.2)"]:
        with pytest.raises(ValueError, match="take|wrong|pattern"):
            draw(spec)


def test_inverse_kendall_and_counting():
    order = draw("uniform")[:5]
    x = np.random.default_rng(0).integers(0, 9, order.shape)
    rank = np.asarray(orders.inverse(jnp.asarray(order)))
    shuffled = np.take_along_axis(x, order, 1)
    np.testing.assert_array_equal(np.take_along_axis(shuffled, rank, 1), x)
    assert orders.kendall_tau(order[0], order[0]) == 1
    assert orders.kendall_tau(order[0], order[0][::-1]) == -1
    assert orders.kendall_tau(np.array([0, 1, 2]), np.array([1, 0, 2])) == pytest.approx(1 / 3)
    for n in range(1, 6):
        sets, sequences = set(), set()
        for p in itertools.permutations(range(n)):
            for i in range(n):
                sets.add((frozenset(p[:i]), p[i]))
                sequences.add(p[: i + 1])
        assert orders.count_conditionals(n) == (len(sets), len(sequences))
