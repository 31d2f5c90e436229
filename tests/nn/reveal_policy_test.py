import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.nn.reveal_policy import (
    RevealMLP,
    RevealPolicy,
    RevealTransformer,
    board_features,
    board_peers,
    log_policy,
    text_features,
)

ROW, COLUMN = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), (0, 1, 2, 3) * 4
BOX = (0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3)
GROUPS = (ROW, COLUMN, BOX)


def case(n, vocab, seed=0):
    draws = np.random.default_rng(seed)
    logits = draws.normal(0, 2, (3, n, vocab)).astype(np.float32)
    masked = draws.random((3, n)) < 0.6
    return jnp.asarray(logits), jnp.asarray(masked)


def laws(logits):
    prob = np.exp(np.asarray(logits, float))
    prob /= prob.sum(-1, keepdims=True)
    return prob, -(prob * np.log(prob)).sum(-1)


def test_peers_share_a_row_a_column_or_a_box():
    peers = board_peers(GROUPS)
    assert np.flatnonzero(peers[0]).tolist() == [1, 2, 3, 4, 5, 8, 12]
    assert np.all(peers.sum(1) == 7) and np.array_equal(peers, peers.T)


def test_features_of_a_board_by_hand():
    logits, masked = case(16, 4)
    peers = board_peers(GROUPS)
    found = np.asarray(board_features(logits, masked, peers))
    assert found.shape == (3, 16, 2 * 4 + 7)
    prob, entropy = laws(logits)
    hidden = np.asarray(masked)
    for b, i in ((0, 0), (1, 7), (2, 15)):
        top = np.sort(prob[b, i])[::-1]
        mean = entropy[b][hidden[b]].mean()
        near = peers[i] & hidden[b]
        rest = (entropy[b, i], top[0] - top[1], hidden[b].mean(), mean, entropy[b, i] - mean)
        expected = [*np.log(top) / 5, *top, *rest, near.sum() / 7, entropy[b][near].mean()]
        np.testing.assert_allclose(found[b, i], expected, rtol=1e-4, atol=1e-5)


def test_features_of_a_text_by_hand():
    logits, masked = case(40, 6)
    given = jnp.broadcast_to(jnp.arange(40)[None] < 10, masked.shape)
    masked = masked & ~given
    found = np.asarray(text_features(logits, masked, given, masked | True, 5))
    assert found.shape == (3, 40, 16)
    prob, entropy = laws(logits)
    hidden = np.asarray(masked)
    for b, i in ((0, 0), (1, 20), (2, 39)):
        top = np.sort(prob[b, i])[::-1]
        known = np.flatnonzero(~hidden[b])
        left, right = known[known <= i], known[known >= i]
        near = np.abs(np.arange(40) - i) <= 8
        distance = (
            np.log1p(i - (left[-1] if len(left) else -1)),
            np.log1p((right[0] if len(right) else 40) - i),
        )
        expected = [
            *(np.log(top[0]) / 5, *top[:3], top[0] - top[1], entropy[b, i] / np.log(6)),
            *(prob[b, i, 5], hidden[b, i] and prob[b, i].argmax() == 5, hidden[b, i], i < 10),
            *(max(i - 10, -1) / 30, *distance, hidden[b][near].mean()),
            entropy[b][near & hidden[b]].sum() / max((near & hidden[b]).sum(), 1) / np.log(6),
            hidden[b].sum() / 30,
        ]
        np.testing.assert_allclose(found[b, i], expected, rtol=1e-4, atol=1e-5)
    none = np.asarray(text_features(logits, masked, given, masked | True, None))
    assert not np.any(none[:, :, 6:8])


@pytest.mark.parametrize("prior", [0.0, 2.0])
@pytest.mark.parametrize("net", [RevealMLP(8), RevealMLP(8, 16), RevealTransformer(16)])
def test_a_fresh_policy_is_uniform_or_its_prior(net, prior):
    policy = RevealPolicy(net, 4, GROUPS if isinstance(net, RevealMLP) else (), None, prior)
    logits, masked = case(16, 4)
    params = jax.jit(policy.init, static_argnums=1)(jax.random.key(0), 16)
    given = ~masked
    scores = policy.scores(params, policy.features(logits, masked, given, masked | True))
    chance = np.asarray(jnp.exp(log_policy(scores, masked)))
    hidden = np.asarray(masked)
    top = laws(logits)[0].max(-1) ** prior * hidden
    np.testing.assert_allclose(
        chance, top / top.sum(1, keepdims=True), rtol=0.1 if prior else 2e-7, atol=1e-9
    )  # features are bfloat16
    assert np.all(chance[~hidden] == 0)
    if not prior:
        assert all(np.ptp(chance[b][hidden[b]]) == 0 for b in range(3))


def test_only_the_policy_with_cells_tells_equal_cells_apart():
    logits, masked = jnp.zeros((1, 16, 4)), jnp.ones((1, 16), bool)
    for cells in (0, 16):
        policy = RevealPolicy(RevealMLP(8, cells), 4, GROUPS)
        params = policy.init(jax.random.key(0), 16)
        params = jax.tree.map(lambda x: x + 0.1, params)
        scores = policy.scores(params, policy.features(logits, masked, ~masked, masked | True))
        assert (np.ptp(np.asarray(scores)) > 1e-3) == bool(cells)


def test_gradients_are_finite_where_one_position_is_left():
    policy = RevealPolicy(RevealMLP(8), 4, GROUPS)
    logits, _ = case(16, 4)
    masked = jnp.arange(16)[None] == jnp.array([[3], [20], [5]])  # the second row has none
    params = policy.init(jax.random.key(0), 16)
    features = policy.features(logits, masked, ~masked, masked | True)
    loss = lambda p: jnp.sum(jnp.exp(log_policy(policy.scores(p, features), masked))[:, 3])
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(jax.grad(loss)(params)))


@pytest.mark.parametrize("net", [RevealMLP(8), RevealTransformer(16)])
def test_padding_changes_no_score(net):
    """Rows of 24 positions alone, and as the beginning of rows of 40 with anything behind them."""
    policy = RevealPolicy(net, 6, eos=5)
    logits, masked = case(40, 6)
    live = jnp.arange(40)[None] < 24 + 0 * masked
    masked, given = masked & live, jnp.arange(40)[None] < 5 + 0 * masked
    masked = masked & ~given
    params = policy.init(jax.random.key(0), 24)
    params = jax.tree.map(lambda x: x + 0.1, params)
    cut = [x[:, :24] for x in (logits, masked, given, live)]
    alone = policy.scores(params, policy.features(*cut))
    for behind in (logits, logits + jnp.where(live, 0.0, 7.0 * jnp.cos(jnp.arange(40)))[..., None]):
        padded = policy.scores(params, policy.features(behind, masked, given, live))
        np.testing.assert_allclose(padded[:, :24], alone, atol=2e-6)
