import numpy as np
import pytest

from aodiff.core import graph

N = 6
RNG = np.random.default_rng(0)
EXCESS, COUNT = RNG.normal(size=(N, N)), RNG.integers(1, 9, size=(N, N)).astype(float)


def test_dependency_averages_first_and_clips_after():
    excess = np.array([[5.0, -3.0], [3.0, 9.0]])
    count = np.array([[0.0, 2.0], [4.0, 0.0]])
    np.testing.assert_array_equal(graph.dependency(excess, count), [[0, 0], [0.75, 0]])
    np.testing.assert_array_equal(graph.mean_excess(excess, count), [[0, -1.5], [0.75, 0]])


@pytest.mark.parametrize("kind", list(graph.RECIPROCAL))
def test_symmetric_non_negative_hollow_and_equivariant(kind):
    depends = graph.dependency(EXCESS, COUNT)
    w = graph.reciprocal_graph(depends, kind)
    np.testing.assert_array_equal(w, w.T)
    assert (w >= 0).all() and not w.diagonal().any() and w.any()
    p = RNG.permutation(N)
    np.testing.assert_allclose(graph.reciprocal_graph(depends[np.ix_(p, p)], kind), w[np.ix_(p, p)])


def test_the_ways_to_combine_two_directions():
    depends = np.array([[0, 0.2, 0.3], [0.8, 0, 0], [0.5, 0.4, 0]])
    pair = {k: graph.reciprocal_graph(depends, k)[0, 1] for k in graph.RECIPROCAL}
    want = {"product": 0.16, "max": 0.8, "mean": 0.5, "geometric": 0.4, "min": 0.2}
    assert pair == pytest.approx(want)
    assert graph.reciprocal_graph(depends)[1, 2] == 0  # one-directional attention is no edge
    assert graph.reciprocal_graph(depends, "max")[1, 2] == 0.4


def test_product_is_at_most_the_squared_maximum():
    depends = graph.dependency(EXCESS, COUNT)
    maximum = graph.reciprocal_graph(depends, "max")
    assert (graph.reciprocal_graph(depends) <= maximum**2 + 1e-15).all()


def test_unknown_kind_names_the_kinds():
    with pytest.raises(ValueError, match="got reciprocal 'sum'; use one of product, max"):
        graph.reciprocal_graph(np.zeros((2, 2)), "sum")


def test_scales():
    w = graph.reciprocal_graph(graph.dependency(EXCESS, COUNT))
    assert graph.unit_degree(w).sum(1).mean() == pytest.approx(1)
    assert not graph.unit_degree(np.zeros((3, 3))).any()
    z = graph.standardise(EXCESS)
    off = z[~np.eye(N, dtype=bool)]
    assert off.mean() == pytest.approx(0) and off.std() == pytest.approx(1)
    assert not z.diagonal().any() and not graph.standardise(np.zeros((3, 3))).any()


def test_spanning_tree_of_a_noisy_tree_is_the_tree():
    parents = [0, 0, 1, 1, 3]
    tree = {(min(i + 1, p), max(i + 1, p)) for i, p in enumerate(parents)}
    w = RNG.uniform(0, 0.4, (N, N))
    for i, j in tree:
        w[i, j] = w[j, i] = RNG.uniform(0.5, 1)
    assert set(graph.maximum_spanning_tree((w + w.T) / 2)) == tree
