"""The measure of orders on cases whose answer is known by hand or by enumeration."""

import itertools
import types

import numpy as np
import pytest

from aodiff.core.orders import kendall_tau
from aodiff.data import DataInfo
from aodiff.evals import order as measures

PATH = tuple((i, i + 1) for i in range(7))
STAR = tuple((0, i) for i in range(1, 8))


def test_parts_may_be_placed_and_turned():
    order = np.array([5, 6, 7, 2, 1, 0, 4, 3])  # three straight parts in a wrong arrangement
    parts = [np.array([5, 6, 7]), np.array([2, 1, 0]), np.array([4, 3])]
    assert measures.arranged_tau(order, parts) == pytest.approx(1)
    assert abs(measures.rise(order)) < 0.5
    assert measures.arranged_tau(order, [order]) == abs(measures.rise(order))


def test_best_arrangement_equals_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(20):
        blocks = [rng.permutation(np.arange(a, b)) for a, b in ((0, 3), (3, 7), (7, 9))]
        order = np.concatenate([blocks[i] for i in rng.permutation(3)])
        best = max(
            abs(
                kendall_tau(
                    np.concatenate([p[::t] for p, t in zip(placed, turns, strict=True)]),
                    np.arange(9),
                )
            )
            for placed in itertools.permutations(blocks)
            for turns in itertools.product((1, -1), repeat=3)
        )
        assert measures.arranged_tau(order, blocks) == pytest.approx(best)


def test_rise_counts_pairs():
    assert measures.rise(np.array([10, 20, 15])) == pytest.approx(1 / 3)
    assert measures.rise(np.array([3, 2, 1])) == pytest.approx(-1)
    assert measures.rise(np.array([4])) == 1


def test_inner_tau_and_switches_see_blocks_alone():
    edges = ((0, 1), (1, 2), (3, 4), (4, 5))
    blocks = measures.components(edges, 6)
    order = np.array([3, 2, 4, 1, 5, 0])  # interleaved, each block straight
    assert measures.inner_tau(order, blocks) == pytest.approx(1)
    assert measures.inner_tau(np.array([0, 2, 1, 3, 4, 5]), blocks) == pytest.approx(1 / 3)
    assert measures.components((), 3).tolist() == [0, 1, 2]


def test_growth_along_a_path_and_a_star():
    assert measures.connected_growth(np.arange(8), PATH) == 1
    assert measures.connected_growth(np.array([0, 2, 4, 6, 1, 3, 5, 7]), PATH) == 4 / 7
    assert measures.connected_growth(np.arange(8), STAR) == 1
    assert measures.connected_growth(np.arange(8)[::-1], STAR) == 1 / 7


def test_costs_of_a_path_by_hand():
    linked = measures.adjacency(PATH, 8)
    distance = abs(np.subtract.outer(np.arange(8), np.arange(8)))
    assert measures.minla(distance, linked) == 14 and measures.two_sum(distance, linked) == 14
    assert (
        measures.minla(2 * distance, linked) == 28 and measures.two_sum(2 * distance, linked) == 56
    )
    # A random order of n puts neighbours (n + 1) / 3 apart on average.
    ratio = measures.ratio_to_random(np.arange(8), linked, measures.minla)
    assert ratio == pytest.approx(1 / 3, rel=0.05)
    assert measures.ratio_to_random(np.arange(8), linked, measures.two_sum) < 0.15


def test_links_found_by_the_heaviest_tree():
    weight = measures.adjacency(PATH, 8) + 0.01
    assert measures.link_recall(weight, PATH) == 1
    assert measures.link_recall(weight, ((0, 1), (0, 2))) == 0.5
    weight[3, 4] = weight[4, 3] = 0
    assert measures.link_recall(weight, tuple(edge[::-1] for edge in PATH)) == pytest.approx(6 / 7)


def test_neighbours_that_inform_each_other_stand_out():
    information = np.kron(np.eye(4), np.ones((2, 2)))  # columns in pairs
    assert measures.adjacent_z(np.arange(8), information) > 2
    assert measures.adjacent_z(np.array([0, 2, 4, 6, 1, 3, 5, 7]), information) < 0


def trained(natural_order, hidden, edges=PATH):
    """What a run leaves behind that read a clean path in `natural_order`."""
    from aodiff.methods.order_state import OrderState

    unit = np.argsort(hidden)
    place = np.array(hidden)
    mean = np.exp(-np.abs(place[:, None] - place[None, :]).astype(float)) - 0.05
    fields = dict.fromkeys(OrderState.__dataclass_fields__)
    count = np.full((2, 8, 8), 20.0)
    state = OrderState(**fields).replace(
        excess=mean[None] * count, count=count, order=unit[natural_order], order_step=np.int32(5)
    )
    info = DataInfo("x", 8, 600, "symbol", edges=edges, permutation=tuple(hidden))
    method = types.SimpleNamespace(reciprocal="product")
    return types.SimpleNamespace(extra=state, info=info, method=method)


def test_a_hidden_path_read_backwards_is_perfect():
    hidden = np.random.default_rng(3).permutation(8).tolist()
    found = measures.measure(trained(np.arange(8)[::-1], hidden))
    for key in ("tau arranged_tau inner_tau split_half_tau link_recall connected_growth").split():
        assert found[key] == pytest.approx(1)
    assert found["block_switches"] == 0 and found["num_parts"] == 1
    assert found["minla_ratio"] == found["minla_ratio_of_links"] < 0.4
    assert "adjacent_information_z" not in found  # too many values to count pairs


def test_without_known_links_the_graph_itself_is_the_yardstick():
    found = measures.measure(trained(np.arange(8), list(range(8)), edges=None))
    assert "link_recall" not in found and 0 < found["minla_ratio"] < 0.7
    worse = measures.measure(trained(np.array([0, 4, 1, 5, 2, 6, 3, 7]), list(range(8)), None))
    assert worse["minla_ratio"] > found["minla_ratio"] and worse["tau"] < 1


def test_without_learned_order_or_graph_there_is_no_measure():
    run = trained(np.arange(8), list(range(8)))
    run.extra = run.extra.replace(order_step=np.int32(-1))
    assert measures.measure(run) == {}
    lost = trained(np.arange(8), list(range(8)))
    lost.extra = lost.extra.replace(excess=-np.abs(lost.extra.excess))
    assert measures.measure(lost) == {}
    run.extra = ()
    assert measures.measure(run) == {}
