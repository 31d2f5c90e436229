import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff.sampling.denoise import SCORES, Decoder, decode
from tests.toy_denoiser import MASK, ROWS, N, ToyDenoiser, joint

V = 5


def hashed(tokens, length=None):
    """Logits that depend on the whole row, (B, n, V + 1); the last id, the mask, is excluded."""
    n = tokens.shape[1]
    weight = jnp.sin(jnp.arange(n * n * (V + 1.0)).reshape(n, n, V + 1) * 7.3)
    logits = 2 * jnp.einsum("bm,mnv->bnv", jnp.cos(tokens * 1.7), weight)
    return logits.at[..., V].set(-1e9)


def run(decoder, given=None, tokens=None, batch=2, n=8, seed=0, denoise=hashed, **options):
    tokens = jnp.zeros((batch, n), jnp.int32) if tokens is None else tokens
    given = jnp.zeros(tokens.shape, bool) if given is None else given
    keys = jax.random.split(jax.random.key(seed), len(tokens))
    fn = jax.jit(lambda *a: decode(denoise, *a, decoder, mask_id=V, **options))
    return jax.device_get(fn(keys, tokens, given))


@pytest.mark.parametrize(
    "schedule, steps, expected",
    [
        ("linear", 4, [3, 3, 2, 2]),
        ("linear", 10, [1] * 10),
        ("linear", 1, [10]),
        ("cosine", 5, [1, 1, 2, 2, 4]),  # slow at the start
        ("threshold(2)", 10, [1] * 10),  # never passed: one a step
        ("threshold(0)", 10, [10]),
    ],
)
def test_numbers_revealed_per_step(schedule, steps, expected):
    out = run(Decoder("confidence", schedule, steps, 10), n=10)
    for row in out.step:
        assert np.bincount(row).tolist() == expected
    assert out.calls.tolist() == [len(expected)] * 2
    assert not np.any(out.tokens == V)


def test_factor_reveals_the_longest_run_of_confident_ranks():
    chances = np.array([0.9, 0.7, 0.69, 0.76])  # bars 1 - 1 / (r + 1): 1/2, 2/3, 3/4, 4/5
    logits = np.log(np.stack([chances, 1 - chances], axis=1))
    fixed = jnp.asarray(np.pad(logits, ((0, 0), (0, 4)), constant_values=-1e9), jnp.float32)
    out = run(
        Decoder("confidence", "factor(1)", 4, 4),
        n=4,
        denoise=lambda tokens, _: jnp.broadcast_to(fixed[None], (len(tokens), 4, 6)),
        temperature=0.0,
    )
    assert out.step[0].tolist() == [0, 1, 1, 0]  # 0.9, 0.76 pass; 0.7 fails its bar of 3/4


@pytest.mark.parametrize("score", ["max_prob", "margin", "entropy", "order", "confidence"])
def test_one_token_a_call_with_exact_conditionals_draws_from_the_law(score):
    """Whatever decides the order from what is revealed, decoding.md 17.1.10."""
    num = 20_000
    order = jnp.argsort(jax.random.uniform(jax.random.key(5), (num, N)), axis=1)
    out = run(
        Decoder(score, "linear", N, N),
        batch=num,
        n=N,
        denoise=lambda t, _: ToyDenoiser(0.0).apply({}, jnp.where(t == V, MASK, t)),
        order=order if score == "order" else None,
    )
    counts = np.bincount(out.tokens @ np.array([9, 3, 1]), minlength=27)
    biased = score == "confidence"  # it looks at the token drawn, not at the state alone
    assert (scipy.stats.chisquare(counts, joint() * num).pvalue > 1e-3) != biased
    by_row = joint()[out.tokens @ np.array([9, 3, 1])]
    np.testing.assert_allclose(out.logp.sum(1), np.log(by_row), atol=1e-4)  # the chain rule


def test_all_at_once_draws_from_the_product_of_the_marginals():
    num = 20_000
    out = run(
        Decoder("confidence", "linear", 1, N),
        batch=num,
        n=N,
        denoise=lambda t, _: ToyDenoiser(0.0).apply({}, jnp.where(t == V, MASK, t)),
    )
    marginal = [np.bincount(ROWS[:, i], joint()) for i in range(N)]
    product = np.einsum("a,b,c->abc", *marginal).reshape(-1)
    counts = np.bincount(out.tokens @ np.array([9, 3, 1]), minlength=27)
    assert scipy.stats.chisquare(counts, product * num).pvalue > 1e-3


def test_blocks_come_in_turn_and_one_position_blocks_are_left_to_right():
    out = run(Decoder("confidence", "linear", 2, 4))
    assert np.all(out.step[:, :4].max(1) < out.step[:, 4:].min(1))
    one = run(Decoder("confidence", "linear", 1, 1), temperature=0.0)
    order = jnp.broadcast_to(jnp.arange(8)[None], (2, 8))
    l2r = run(Decoder("order", "linear", 8), temperature=0.0, order=order)
    np.testing.assert_array_equal(one.tokens, l2r.tokens)
    np.testing.assert_array_equal(one.step, np.tile(np.arange(8), (2, 1)))


def test_given_tokens_stay_and_are_no_steps():
    given = jnp.asarray(np.arange(16).reshape(2, 8) % 3 == 0)
    tokens = jnp.full((2, 8), 4)
    out = run(Decoder("entropy", "linear", 8, 8), given, tokens)
    assert np.all(out.tokens[given] == 4) and np.all((out.step == -1) == given)
    assert out.calls.tolist() == (~given).sum(1).tolist()


def test_a_row_does_not_depend_on_its_batch():
    decoder = Decoder("margin", "threshold(0.6)", 8, 8)
    rng = np.random.default_rng(0)
    given, tokens = rng.random((4, 8)) < 0.4, rng.integers(0, V, (4, 8))
    keys = jax.random.split(jax.random.key(3), 4)
    fn = jax.jit(lambda k, t, g: decode(hashed, k, t, g, decoder, mask_id=V))
    whole = fn(keys, jnp.asarray(tokens), jnp.asarray(given))
    for rows in ([2], [3, 0, 2, 1]):
        part = fn(keys[jnp.array(rows)], jnp.asarray(tokens[rows]), jnp.asarray(given[rows]))
        np.testing.assert_array_equal(part.tokens, np.asarray(whole.tokens)[rows])
        np.testing.assert_array_equal(part.calls, np.asarray(whole.calls)[rows])


def test_ties_go_to_the_left():
    flat = lambda tokens, _: jnp.zeros((*tokens.shape, V + 1)).at[..., V].set(-1e9)
    for score in set(SCORES) - {"random", "r2l"}:
        out = run(Decoder(score, "linear", 8), denoise=flat, temperature=0.0)
        np.testing.assert_array_equal(out.step[0], np.arange(8))
