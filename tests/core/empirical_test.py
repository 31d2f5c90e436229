"""Orders from training rows: entropies in closed form, tiny joints, hidden chains."""

import numpy as np
import pytest

from aodiff.core import empirical
from aodiff.core.orders import kendall_tau


def everywhere(tokens):
    return np.ones(tokens.shape, bool)


def test_entropy_is_plug_in_plus_half_a_cell_per_sample():
    assert empirical.entropy(np.array([3, 0, 1])) == pytest.approx(
        -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) + 1 / 8
    )
    assert empirical.entropy(np.array([[5, 0]])) == 0 == empirical.entropy(np.zeros(2))


def test_information_of_a_tiny_joint():
    """8000 rows: b copies a (one bit), c is a XOR d, so that no pair tells about it."""
    a, d = (np.tile(x, 2000) for x in ([0, 0, 1, 1], [0, 1, 0, 1]))
    tokens = np.stack([a, a, a ^ d, d], axis=1).astype(np.uint16)
    found = empirical.mutual_information(tokens, everywhere(tokens))
    expected = np.zeros((4, 4))
    expected[0, 1] = expected[1, 0] = np.log(2)
    np.testing.assert_allclose(found, expected, atol=1e-4)  # one half cell in 8000 rows
    np.testing.assert_allclose(
        empirical.marginal_entropies(tokens, everywhere(tokens)), np.log(2), atol=1e-4
    )


def test_independent_units_have_no_information_on_average():
    """16 values, 1000 rows: the plug-in estimate would be 15 * 15 / 2000 = 0.11 nats."""
    tokens = np.random.default_rng(0).integers(0, 16, (1000, 8))
    pairs = empirical.mutual_information(tokens, everywhere(tokens))[~np.eye(8, dtype=bool)]
    assert pairs.mean() < 0.015


def test_missing_cells_do_not_count():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (600, 3))
    tokens[:, 1] = tokens[:, 0]
    present = everywhere(tokens)
    present[300:, 1] = False
    tokens[300:, 1] = 0  # what stands in a missing cell is arbitrary
    found = empirical.mutual_information(tokens, present)
    whole = empirical.mutual_information(tokens[:300], present[:300])
    assert found[0, 1] == whole[0, 1] == found[1, 0] > 1
    present[:, 1] = False
    assert not empirical.mutual_information(tokens, present)[1].any()
    assert empirical.marginal_entropies(tokens, present)[1] == 0


def test_greedy_takes_the_surest_unit_and_then_the_easiest():
    """Unit 2 is nearly constant, 0 is wide, 3 copies 0, 1 is a coin: 2, 1, 0, 3."""
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 8, 4000)
    columns = wide, rng.integers(0, 2, 4000), rng.random(4000) < 0.01, wide
    tokens = np.stack(columns, axis=1).astype(int)
    order = empirical.greedy_entropy_order(tokens, everywhere(tokens))
    assert order.tolist() == [2, 1, 0, 3]


def hidden_chain(rows: int, n: int, vocab: int):
    """Rows of a copying chain with a fifth of noise, and its order behind a permutation."""
    rng = np.random.default_rng(1)
    chain = [rng.integers(0, vocab, rows)]
    for _ in range(n - 1):
        noise = rng.integers(0, vocab, rows)
        chain.append(np.where(rng.random(rows) < 0.2, noise, chain[-1]))
    place = rng.permutation(n)
    return np.stack(chain, axis=1)[:, place], np.argsort(place)


def test_both_orders_follow_a_hidden_chain():
    tokens, order = hidden_chain(2000, 10, 4)
    line = empirical.mi_fiedler_order(tokens, everywhere(tokens))
    assert abs(kendall_tau(line, order)) == 1
    place = np.argsort(order)[empirical.greedy_entropy_order(tokens, everywhere(tokens))]
    seen = [{place[0]}]
    for unit in place[1:]:
        assert unit - 1 in seen[-1] or unit + 1 in seen[-1]  # always grows at an end
        seen.append(seen[-1] | {unit})


def test_relabelled_units_give_relabelled_orders():
    tokens, _ = hidden_chain(500, 7, 3)
    shuffle = np.random.default_rng(2).permutation(7)
    for find in empirical.ORDERS.values():
        a, b = find(tokens, everywhere(tokens)), find(tokens[:, shuffle], everywhere(tokens))
        assert np.array_equal(shuffle[b], a) or np.array_equal(shuffle[b], a[::-1])


def test_no_information_is_no_failure():
    tokens = np.zeros((20, 5), int)
    for find in empirical.ORDERS.values():
        assert find(tokens, everywhere(tokens)).tolist() == list(range(5))
