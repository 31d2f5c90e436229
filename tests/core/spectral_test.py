import numpy as np
import pytest

from aodiff.core import spectral
from aodiff.core.spectral import fiedler, seriate, soft_rank, teach


@pytest.fixture(params=["dense", "iterative"], autouse=True)
def solver(request, monkeypatch):
    """Everything here holds for both solvers, whatever the size."""
    monkeypatch.setattr(spectral, "DENSE", {"dense": 10_000, "iterative": 0}[request.param])
    return request.param


def path(n, background=0.0, decay=1.0):
    place = np.arange(n)
    w = np.exp(-decay * abs(place[:, None] - place[None, :])) + background
    return np.where(np.eye(n, dtype=bool), 0.0, w)


def hide(w, seed):
    p = np.random.default_rng(seed).permutation(len(w))
    return w[np.ix_(p, p)], p


def is_line(places):
    """True where the true places, read in the found order, go straight up or straight down."""
    step = np.diff(places)
    return abs(step.sum()) == len(step) and (abs(step) == 1).all()


@pytest.mark.parametrize("n", [8, 33, 128])
@pytest.mark.parametrize("background", [0.0, 0.1])
def test_recovers_a_hidden_path(n, background):
    w, p = hide(path(n, background), n)
    found = seriate(w)
    assert found.num_parts == 1 and is_line(p[found.order])


@pytest.mark.parametrize("n", [256, 512])
@pytest.mark.parametrize("background", [0.0, 0.05, 0.1])
def test_long_hidden_paths_are_recovered_and_again_bit_for_bit(n, background):
    w, p = hide(path(n, background), n)
    found = seriate(w)
    assert found.num_parts == 1 and is_line(p[found.order])
    again = seriate(w)
    assert found.lambda_2 == again.lambda_2 and (found.priority == again.priority).all()


def test_eigenvalues_have_closed_forms_also_where_they_are_double():
    place = np.arange(30)
    gap = abs(place[:, None] - place[None, :])
    line, ring = 1.0 * (gap == 1), 1.0 * np.isin(gap, (1, 29))
    of = lambda angle: 2 - 2 * np.cos(angle)
    np.testing.assert_allclose(fiedler(line)[1:], of(np.pi * np.array([1, 2]) / 30), rtol=1e-9)
    np.testing.assert_allclose(fiedler(ring)[1:], [of(2 * np.pi / 30)] * 2, rtol=1e-9)
    np.testing.assert_allclose(fiedler(1 - np.eye(30))[1:], [30, 30], rtol=1e-9)


def test_both_solvers_agree_on_a_noisy_graph(monkeypatch):
    noise = np.maximum(np.random.default_rng(0).normal(size=(150, 150)), 0)
    w = path(150) + 0.01 * noise * noise.T
    np.fill_diagonal(w, 0)
    found = {}
    for dense in (0, 10_000):
        monkeypatch.setattr(spectral, "DENSE", dense)
        found[dense] = fiedler(w)
    np.testing.assert_allclose(found[0][1:], found[10_000][1:], rtol=1e-9)
    np.testing.assert_allclose(abs(found[0][0] @ found[10_000][0]), 1, rtol=1e-9)


def test_a_uniform_background_moves_eigenvalues_and_nothing_else():
    w, _ = hide(path(12), 0)
    hollow = 1 - np.eye(12)
    f, l2, l3 = fiedler(w)
    g, m2, m3 = fiedler(w + 0.7 * hollow)
    np.testing.assert_allclose(abs(f @ g), 1, rtol=1e-9)
    np.testing.assert_allclose([m2 - l2, m3 - l3], 0.7 * 12)


def test_relabelling_units_relabels_the_order():
    w, _ = hide(path(11), 1)
    p = np.random.default_rng(2).permutation(11)
    a, b = seriate(w).order, p[seriate(w[np.ix_(p, p)]).order]
    assert (a == b).all() or (a == b[::-1]).all()


def test_two_disconnected_paths_stay_whole_and_straight():
    n = 7
    w = np.zeros((2 * n, 2 * n))
    w[:n, :n] = w[n:, n:] = path(n)
    w, p = hide(w, 3)
    found = seriate(w)
    places = p[found.order]
    assert found.num_parts == 2
    for part in (places[:n], places[n:]):
        assert is_line(part) and (part < n).all() | (part >= n).all()


def test_weak_affinity_joins_the_facing_ends():
    n = 6
    strong = np.zeros((2 * n, 2 * n))
    strong[:n, :n] = strong[n:, n:] = path(n)
    weak = path(2 * n, decay=0.3) - 0.5  # negative excess is legal: only differences count
    for seed in range(4):
        p = np.random.default_rng(seed).permutation(2 * n)
        ix = np.ix_(p, p)
        assert is_line(p[seriate(strong[ix], weak[ix]).order])


def test_many_parts_follow_the_weak_chain():
    w = np.kron(np.eye(4), 1 - np.eye(3))  # four separate triangles
    weak = path(12, decay=0.5)
    found = seriate(w, weak)
    assert found.num_parts == 4
    blocks = found.order.reshape(4, 3) // 3
    assert (blocks == blocks[:, :1]).all() and is_line(blocks[:, 0])


def test_hundreds_of_single_units_cost_a_handful_of_eigenvectors(monkeypatch):
    calls = []
    monkeypatch.setattr(
        spectral, "fiedler", lambda graph: (calls.append(len(graph)), fiedler(graph))[1]
    )
    w, p = hide(np.pad(path(40), (0, 80)), 7)
    found = seriate(w, hide(path(120, decay=0.1), 7)[0])
    assert found.num_parts == 81 and is_line(p[found.order]) and len(calls) < 6


def test_no_edge_is_no_graph():
    assert seriate(np.zeros((5, 5))) is None


def test_priorities_agree_with_the_order_and_reverse():
    found = seriate(hide(path(9), 5)[0])
    assert found.priority.min() == 0 and found.priority.max() == 1
    np.testing.assert_array_equal(np.argsort(-found.priority), found.order)
    back = found.reverse()
    np.testing.assert_allclose(back.priority, 1 - found.priority)
    np.testing.assert_array_equal(np.argsort(-back.priority), back.order)


def test_soft_ranks_space_evenly_and_keep_near_ties_near():
    cosine = np.cos(np.pi * (np.arange(20) + 0.5) / 20)  # the Fiedler vector of a path
    gaps = -np.diff(soft_rank(cosine))
    minmax = -np.diff(cosine) / np.ptp(cosine)
    assert minmax.max() / minmax.min() > 6 and gaps.max() / gaps.min() < 3
    tied = soft_rank(np.array([0.0, 0.5, 0.5001, 1.0]))
    assert 0 < tied[2] - tied[1] < 0.01
    np.testing.assert_allclose(soft_rank(-cosine), 1 - soft_rank(cosine))


@pytest.mark.parametrize("size", [1e-12, 1e-3])
def test_noise_moves_no_unit_of_a_disconnected_graph(size):
    w = np.zeros((15, 15))
    w[:6, :6], w[6:13, 6:13] = path(6), path(7)  # two paths and two units without any link
    weak = path(15, decay=0.3)
    w, p = hide(w, 4)
    weak = weak[np.ix_(p, p)]
    before = seriate(w, weak)
    assert sorted(len(part) for part in before.parts)[-2:] == [6, 7]
    for seed in range(5):
        noise = 1 + size * np.random.default_rng(seed).random((15, 15))
        after = seriate(w * (noise + noise.T) / 2, weak)
        same = (after.order == before.order).all() or (after.order == before.order[::-1]).all()
        assert same and len(after.parts) == len(before.parts)


@pytest.mark.parametrize(
    "w",
    [
        1 - np.eye(6),  # all alike
        np.roll(np.eye(6), 1, 0) + np.roll(np.eye(6), -1, 0),  # a cycle: lambda_2 = lambda_3
        np.pad(np.ones((1, 5)), ((0, 5), (1, 0))) + np.pad(np.ones((5, 1)), ((1, 0), (0, 5))),
        np.kron(np.eye(3), 1 - np.eye(2)),  # three pairs
    ],
)
def test_ties_give_one_reproducible_order(w):
    found, again = seriate(w), seriate(w.copy())
    np.testing.assert_array_equal(found.order, again.order)
    np.testing.assert_array_equal(np.sort(found.order), np.arange(6))
    assert np.isfinite(found.priority).all()
    assert found.priority.min() >= 0 and found.priority.max() <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(found.parts)), np.arange(6))


def test_parts_make_the_line_and_turn_with_it():
    w = np.kron(np.eye(3), path(4))
    found = seriate(*(hide(x, 8)[0] for x in (w, path(12, decay=0.5))))
    np.testing.assert_array_equal(np.concatenate(found.parts), found.order)
    back = found.reverse()
    np.testing.assert_array_equal(np.concatenate(back.parts), back.order)
    assert back.num_parts == found.num_parts == 3


def test_uniform_attention_teaches_nothing():
    count = 20.0 * (1 - np.eye(5))
    assert teach(np.zeros((5, 5)), count, "product") is None
    assert teach(-count, count, "product") is None
    one_way = np.triu(count, 1) - np.tril(count, -1)
    assert teach(one_way, count, "product") is None and teach(one_way, count, "max") is not None
