import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core import graph
from aodiff.core.curriculum import gumbel_order
from aodiff.core.evidence import excess_sum, visible_count

B, H, N = 3, 2, 5


def causal_probs(key, shape, n):
    logits = jax.random.normal(key, (*shape, n, n))
    causal = jnp.tril(jnp.ones((n, n), bool))[(None,) * len(shape)]
    return jax.nn.softmax(jnp.where(causal, logits, -jnp.inf), axis=-1)


@pytest.fixture(scope="module")
def example():
    keys = jax.random.split(jax.random.key(0), 2)
    order = jax.vmap(lambda k: jax.random.permutation(k, N))(jax.random.split(keys[0], B))
    return causal_probs(keys[1], (B, H), N), order


@pytest.mark.parametrize("drop_last", [False, True])
def test_equals_a_loop_over_every_slot_pair(example, drop_last):
    probs, order = map(np.asarray, example)
    excess, count = np.zeros((N, N)), np.zeros((N, N))
    for b in range(B):
        for s in range(N):  # slot s predicts order[s]; slot r + 1 holds order[r]
            for r in range(s - 1 if drop_last else s):
                i, j = order[b, s], order[b, r]
                excess[i, j] += probs[b, :, s, r + 1].mean() - 1 / (s + 1)
                count[i, j] += 1
    np.testing.assert_allclose(excess_sum(*example, drop_last), excess, atol=1e-6)
    np.testing.assert_array_equal(visible_count(example[1], drop_last), count)


def test_the_one_hot_route_agrees(example):
    probs, order = example
    reveal = jax.nn.one_hot(order, N)  # [b, slot, position]
    mapped = jnp.einsum("bsi,bhst,btj->bij", reveal, probs[..., 1:], reveal[:, :-1]) / H
    rank = jnp.argsort(order, axis=1)
    visible = rank[:, None, :] < rank[:, :, None]
    want = jnp.where(visible, mapped - 1 / (rank[:, :, None] + 1), 0).sum(0)
    np.testing.assert_allclose(excess_sum(probs, order, False), want, atol=1e-6)


def test_rows_sum_to_the_start_vectors_deficit(example):
    probs, order = example
    rank = jnp.argsort(order, axis=1)
    start = jnp.take_along_axis(probs[..., 0].mean(1), rank, axis=1)
    deficit = (start - 1 / (rank + 1)).sum(0)
    rows = excess_sum(probs, order, drop_last=False).sum(1)
    np.testing.assert_allclose(rows + deficit, jnp.zeros(N), atol=1e-6)


def test_every_pair_is_counted_once_per_example(example):
    count = visible_count(example[1], drop_last=False)
    np.testing.assert_array_equal(count + count.T, B * (1 - np.eye(N)))
    with_drop = visible_count(example[1])
    assert with_drop.sum() == B * (N - 1) * (N - 2) / 2 and jnp.trace(with_drop) == 0


def test_renaming_positions_permutes_both_axes(example):
    probs, order = example
    rename = jnp.array([3, 0, 4, 1, 2])
    back = jnp.argsort(rename)
    for fn in (lambda o: excess_sum(probs, o), visible_count):
        np.testing.assert_allclose(fn(rename[order]), fn(order)[back][:, back], atol=1e-6)


def test_uniform_attention_leaves_nothing(example):
    uniform = jnp.tril(jnp.ones((N, N))) / jnp.arange(1, N + 1)[:, None]
    probs = jnp.broadcast_to(uniform[None, None], (B, H, N, N))
    np.testing.assert_allclose(excess_sum(probs, example[1]), np.zeros((N, N)), atol=1e-6)


def test_no_gradient_reaches_the_attention(example):
    probs, order = example
    grad = jax.grad(lambda p: jnp.sum(excess_sum(p, order) ** 2))(probs)
    assert not np.any(grad)


def test_counts_remove_the_bias_of_orders_that_are_not_uniform():
    """A stream whose attention to j exceeds uniform by a fixed amount, plus noise, read in orders
    that reveal low units first: only the division by exposures gives that amount back."""
    num = 4000
    keys = jax.random.split(jax.random.key(1), 3)
    excess = jax.random.normal(keys[0], (N, N)) * (1 - jnp.eye(N))
    priority = jnp.linspace(1, 0, N)
    order = jax.vmap(gumbel_order, (0, None, None))(jax.random.split(keys[1], num), priority, 2.0)
    rank = jnp.argsort(order, axis=1)
    noise = jax.random.normal(keys[2], (num, N, N))
    attention = 1 / (rank[:, :, None] + 1) + excess[None] + noise  # [example, target, source]
    rows = jnp.take_along_axis(attention, order[:, :, None], axis=1)
    slots = jnp.take_along_axis(rows, order[:, None, :], axis=2)
    probs = jnp.pad(slots[..., :-1], ((0, 0), (0, 0), (1, 0)))[:, None]

    found, count = np.asarray(excess_sum(probs, order)), np.asarray(visible_count(order))
    off = ~np.eye(N, dtype=bool)
    assert count[off].max() > 10 * count[off].min() > 500
    error = (graph.mean_excess(found, count) - excess)[off] * np.sqrt(count[off])
    assert np.abs(error).max() < 4 and 0.6 < error.std() < 1.4
    naive = found / count[off].mean()
    assert np.abs((naive - excess)[off] * np.sqrt(count[off])).max() > 20
