"""Any-order generation against a stub whose conditionals are exact, by enumeration and chi-square.

The stub has the `decode` contract of the real model but is order-invariant: it reads off cache and
content rows which tokens are known and returns the true conditional of a joint table.
"""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from aodiff.core import categorical
from aodiff.sampling import anyorder

KV = collections.namedtuple("KV", "k v")
V, N = 3, 3
ALL = np.array(list(itertools.product(range(V), repeat=N)))  # (V^n, n)


class TableModel:
    """Exact conditionals of a joint distribution params (V^n,) over all rows of `ALL`."""

    def init_cache(self, batch, length):
        return KV(jnp.zeros((1, batch, 1, length, 1)), jnp.full((1, batch, 1, length, 1), jnp.nan))

    def apply(self, joint, token, own, target, valid, probe_target, cache, cache_valid, *, method):
        assert method == "decode"
        row = jnp.stack([own, token]).astype(jnp.float32)
        own = jnp.concatenate([cache.k[0, :, 0, :, 0].astype(int), own], 1)
        token = jnp.concatenate([cache.v[0, :, 0, :, 0].astype(int), token], 1)
        seen = jnp.concatenate([cache_valid, valid], 1) & (own >= 0)
        held = jnp.asarray(ALL.T)[jnp.maximum(own, 0)]  # (B, slots, V^n)
        fits = jnp.all(~seen[:, :, None] | (held == token[:, :, None]), axis=1)
        weight = jnp.where(fits, joint[None], 0.0)
        hot = jnp.asarray(np.eye(V)[ALL.T])  # (n, V^n, V)
        logits = jnp.log(jnp.einsum("bs,brsv->brv", weight, hot[probe_target]))
        return logits, KV(*(r[None, :, None, :, None] for r in row))


STUB = TableModel()


def keys(num, seed=0):
    return jax.random.split(jax.random.key(seed), num)


def repeat(row, num):
    return jnp.broadcast_to(jnp.asarray(row)[None], (num, len(row)))


@pytest.fixture(scope="module")
def joint():
    return jnp.asarray(np.random.default_rng(0).dirichlet(np.full(V**N, 0.7)), jnp.float32)


def stub_run(joint, order, *, num=20_000, given=(0,) * N, tokens=(0,) * N, seed=0, **kwargs):
    kwargs = dict(steps=N) | kwargs
    args = repeat(tokens, num), repeat(np.array(given, bool), num), repeat(order, num)
    return anyorder.generate(STUB, joint, keys(num, seed), *args, **kwargs)


def pvalue(tokens, probs):
    """Chi-square of sampled rows (B, n) against probabilities of `ALL`; impossible rows fail."""
    index = np.asarray(tokens) @ V ** np.arange(N)[::-1]
    counts = np.bincount(index, minlength=V**N)
    expected = len(index) * np.asarray(probs, np.float64) / np.sum(np.asarray(probs, np.float64))
    assert counts[expected == 0].sum() == 0
    keep = expected > 5
    observed = np.append(counts[keep], counts[~keep].sum())
    wanted = np.append(expected[keep], expected[~keep].sum())
    nonzero = wanted > 0
    return stats.chisquare(observed[nonzero], wanted[nonzero]).pvalue


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedule_is_strictly_increasing_and_ends_at_n(kind):
    for n in range(1, 40):
        for steps in range(1, n + 1):
            revealed = anyorder.reveal_schedule(n, steps, kind)
            assert revealed.shape == (steps,) and revealed[-1] == n
            assert np.all(np.diff(revealed, prepend=0) >= 1)
        np.testing.assert_array_equal(revealed, np.arange(1, n + 1))


def test_schedule_values():
    np.testing.assert_array_equal(anyorder.reveal_schedule(10, 4, "linear"), [2, 5, 7, 10])
    # floor(10 (1 - cos(i pi / 8))) = 0, 2, 6, 10; the first is lifted to 1.
    np.testing.assert_array_equal(anyorder.reveal_schedule(10, 4, "cosine"), [1, 2, 6, 10])
    # 1 - cos(pi / 3) = 1/2 on paper.
    assert anyorder.reveal_schedule(1024, 3, "cosine")[1] == 512
    slow, even = (anyorder.reveal_schedule(1024, 64, k) for k in ("cosine", "linear"))
    assert np.all(slow[:40] < even[:40])


def test_schedule_rejects_what_it_cannot_do():
    for steps in (0, 9):
        with pytest.raises(ValueError, match=f"steps={steps} .* n=8 .* use 1 to 8"):
            anyorder.reveal_schedule(8, steps, "linear")
    with pytest.raises(ValueError, match="'square'; use one of: linear, cosine"):
        anyorder.reveal_schedule(8, 4, "square")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_sequential_joint_does_not_depend_on_the_order(joint, order):
    assert pvalue(stub_run(joint, order).tokens, joint) > 0.01


def test_parallel_joint_is_the_product_of_its_groups(joint):
    """Two calls reveal 1 then 2 tokens: p(x_2) p(x_0 | x_2) p(x_1 | x_2)."""
    found = stub_run(joint, (2, 0, 1), steps=2)
    np.testing.assert_array_equal(np.unique(found.step, axis=0), [[1, 1, 0]])
    table = np.asarray(joint, np.float64).reshape(V, V, V)
    p2 = table.sum((0, 1))
    p02, p12 = table.sum(1), table.sum(0)
    product = p02[:, None, :] * p12[None, :, :] / p2[None, None, :]
    assert pvalue(found.tokens, product.ravel()) > 0.01
    assert pvalue(found.tokens, joint) < 1e-6  # the approximation is visible, so the test can fail


@pytest.mark.parametrize("steps", [2, 3])
def test_infill_draws_the_conditional(joint, steps):
    """Position 1 given as 2; two targets remain, one per call even when more calls are allowed."""
    found = stub_run(joint, (0, 1, 2), given=(0, 1, 0), tokens=(1, 2, 0), steps=steps)
    np.testing.assert_array_equal(np.unique(found.step, axis=0), [[0, -1, 1]])
    assert pvalue(found.tokens, np.where(ALL[:, 1] == 2, joint, 0)) > 0.01


def test_temperature_zero_takes_the_mode(joint):
    found = np.unique(stub_run(joint, (1, 2, 0), num=64, temperature=0.0).tokens, axis=0)
    table = np.asarray(joint).reshape(V, V, V)
    b = table.sum((0, 2)).argmax()
    c = table[:, b].sum(0).argmax()
    np.testing.assert_array_equal(found, [[table[:, b, c].argmax(), b, c]])


def test_rows_with_different_prompts_do_not_touch_each_other(joint):
    """Prompt sizes 0 to n in one batch, every row equal to the row generated alone, bit for bit."""
    given = jnp.array(list(itertools.product([False, True], repeat=N)))
    order = jnp.array(list(itertools.permutations(range(N))) + [(0, 1, 2), (2, 1, 0)])
    tokens = jnp.asarray(ALL[[5, 9, 13, 26, 0, 11, 22, 17]])
    kwargs = dict(steps=2, schedule="cosine")
    together = anyorder.generate(STUB, joint, keys(8), tokens, given, order, **kwargs)
    for i in (0, 3, 7):  # 0, 2 and 3 given positions
        rows = (x[i : i + 1] for x in (keys(8), tokens, given, order))
        alone = anyorder.generate(STUB, joint, *rows, **kwargs)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        np.testing.assert_array_equal(alone.step[0], together.step[i])
    np.testing.assert_array_equal(together.tokens[given], tokens[given])
    np.testing.assert_array_equal(together.step == -1, given)
    np.testing.assert_array_equal(together.lengths, np.full(8, N))
    calls = np.asarray(together.step).max(1) + 1
    np.testing.assert_array_equal(calls, np.minimum(N - given.sum(1), 2))


def test_tokens_that_are_not_given_are_ignored(joint):
    given = dict(given=(0, 1, 0), num=32)
    a = stub_run(joint, (0, 1, 2), tokens=(0, 2, 0), **given)
    b = stub_run(joint, (0, 1, 2), tokens=(9, 2, -7), **given)
    np.testing.assert_array_equal(a.tokens, b.tokens)


def test_under_jit_and_with_a_bound_on_the_prompt(joint):
    def run(keys, given, max_given=None):
        return anyorder.generate(
            STUB,
            joint,
            keys,
            repeat((0, 2, 0), 32),
            given,
            repeat((2, 1, 0), 32),
            steps=2,
            max_given=max_given,
        )

    given = repeat((False, True, False), 32)
    plain = run(keys(32), given)
    for bound in (None, 1):
        jitted = jax.jit(lambda k, g: run(k, g, bound))(keys(32), given)  # noqa: B023
        np.testing.assert_array_equal(plain.tokens, jitted.tokens)
        np.testing.assert_array_equal(plain.step, jitted.step)
    with pytest.raises(ValueError, match="gives 1 positions but max_given=0"):
        run(keys(32), given, 0)


def test_given_positions_come_first():
    order = jnp.array([[3, 1, 0, 2], [0, 1, 2, 3]])
    given = jnp.array([[True, False, True, False], [False, False, False, False]])
    found = anyorder.realised_order(order, given)
    np.testing.assert_array_equal(found, [[0, 2, 3, 1], [0, 1, 2, 3]])


def test_bad_requests_say_what_is_allowed(joint):
    with pytest.raises(ValueError, match="order row 0 is not a permutation of 0..2"):
        stub_run(joint, (0, 1, 1), num=2)
    with pytest.raises(ValueError, match="order row 0 is not a permutation"):
        stub_run(joint, (0, 1, 3), num=2)
    with pytest.raises(ValueError, match="steps=4 .* n=3"):
        stub_run(joint, (0, 1, 2), num=2, steps=4)
    with pytest.raises(ValueError, match="order has shape"):
        stub_run(joint, (0, 1), num=2)
    with pytest.raises(ValueError, match="given has dtype int32"):
        anyorder.generate(
            STUB, joint, keys(1), *[jnp.arange(N)[None]] * 2, jnp.arange(N)[None], steps=1
        )


def test_lemma_1_deciding_the_positions_first_changes_nothing():
    """One reverse step of masked diffusion from t to s, two masked positions, V=2 (plus mask).

    Direct: every masked position draws from {tokens with p (t-s)/t, mask with s/t}. Two-stage: the
    Bernoulli decides which positions are revealed, then only those draw from p. Same law.
    """
    num, t, s = 20_000, 0.8, 0.5
    p = np.array([[0.7, 0.3], [0.1, 0.9]])
    direct_law = np.concatenate([p * (t - s) / t, np.full((2, 1), s / t)], axis=1)

    def draw(probs, seed):
        grid = jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32))[None], (num, *probs.shape))
        return np.asarray(categorical.sample(keys(2 * num, seed).reshape(num, 2), grid, 1.0, 1.0))

    direct = draw(direct_law, 1)
    reveal = np.asarray(jax.random.bernoulli(jax.random.key(2), (t - s) / t, (num, 2)))
    staged = np.where(reveal, draw(p, 3), 2)
    exact = np.einsum("i,j->ij", *direct_law).ravel()
    for sample in (direct, staged):
        counts = np.bincount(sample @ [3, 1], minlength=9)
        assert stats.chisquare(counts, exact * num).pvalue > 0.01
    table = [np.bincount(x @ [3, 1], minlength=9) for x in (direct, staged)]
    assert stats.chi2_contingency(table).pvalue > 0.01
