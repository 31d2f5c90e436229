"""How good a learned order is: against the known structure of the data, and on its own graph."""

from collections.abc import Callable

import numpy as np
import scipy.sparse.csgraph
import scipy.stats

from aodiff.core import empirical, graph, spectral
from aodiff.core.orders import kendall_tau
from aodiff.evals.trained import Trained
from aodiff.methods.order_state import OrderState

RANDOM_ORDERS = 200
MOST_CELLS = 4096  # units x ids of the data whose mutual information is measured


def measure(trained: Trained) -> dict[str, float]:
    """Quality of the learned order; empty for a method that learns none or whose graph is gone.

    Source: ordergpt.md sections 8.3, 15 and 17.
    """
    state = trained.extra
    if not isinstance(state, OrderState) or state.order_step < 0:
        return {}
    info, kind = trained.info, trained.method.reciprocal
    place = np.arange(info.seq_len) if info.permutation is None else np.array(info.permutation)
    order = place[np.asarray(state.order)]  # natural positions, in the order they are written
    excess, count = (np.asarray(x, np.float64) for x in (state.excess, state.count))
    line = spectral.teach(excess.sum(0), count.sum(0), kind)
    if line is None:
        return {}
    weight = graph.reciprocal_graph(graph.dependency(excess.sum(0), count.sum(0)), kind)
    natural = np.argsort(place)
    weight = weight[np.ix_(natural, natural)]
    found = {
        "tau": abs(rise(order)),
        "arranged_tau": arranged_tau(order, [place[part] for part in line.parts]),
        "num_parts": len(line.parts),
        "split_half_tau": split_half_tau(excess, count, kind),
    }
    linear = adjacency(info.edges, len(order)) if info.edges else weight
    found["minla_ratio"] = ratio_to_random(order, linear, minla)
    found["two_sum_ratio"] = ratio_to_random(order, linear, two_sum)
    if info.edges:
        # What a line through the known links reaches: some trees do not fit a line well.
        best = spectral.seriate(linear).order
        found["minla_ratio_of_links"] = ratio_to_random(best, linear, minla)
        found["link_recall"] = link_recall(weight, info.edges)
        found["connected_growth"] = connected_growth(order, info.edges)
        blocks = components(info.edges, len(order))
        found["block_switches"] = int(np.sum(blocks[order][1:] != blocks[order][:-1]))
        found["inner_tau"] = inner_tau(order, blocks)
    if info.seq_len * info.vocab_size <= MOST_CELLS:
        information = empirical.mutual_information(*trained.rows("train", 4096))
        found["adjacent_information_z"] = adjacent_z(order, information)
    return found


def arranged_tau(order: np.ndarray, parts: list[np.ndarray]) -> float:
    """|tau| to the natural order, had the parts been placed and turned as well as they can be.

    Args:
      order: (n,) natural positions in the order they are written.
      parts: natural positions of each part, together a permutation of 0 .. n - 1.

    Returns:
      The best |tau| over turns of the parts, with the parts sorted by their mean position. This is
      the best over all arrangements of parts that do not interleave in the natural order.

    Source: ordergpt.md section 8.3 (best-arrangement tau).
    """
    rank = np.argsort(order)
    written = [part[np.argsort(rank[part])] for part in sorted(parts, key=np.mean)]
    return abs(rise(np.concatenate([p if rise(p) >= 0 else p[::-1] for p in written])))


def rise(places: np.ndarray) -> float:
    """Kendall's tau of numbers to the order they stand in: 1 if always rising, -1 if falling."""
    if len(places) < 2:
        return 1.0
    return float(scipy.stats.kendalltau(np.arange(len(places)), places).statistic)


def split_half_tau(excess: np.ndarray, count: np.ndarray, kind: str) -> float:
    """|tau| of the lines of two disjoint halves of the evidence, both (2, n, n)."""
    halves = [spectral.teach(e, c, kind) for e, c in zip(excess, count, strict=True)]
    return abs(kendall_tau(halves[0].order, halves[1].order)) if all(halves) else 0.0


def adjacency(edges: tuple[tuple[int, int], ...], n: int) -> np.ndarray:
    """(n, n) float64, 1 for every linked pair in both directions."""
    matrix = np.zeros((n, n))
    i, j = np.array(edges, int).reshape(-1, 2).T
    matrix[i, j] = matrix[j, i] = 1.0
    return matrix


def minla(distance: np.ndarray, weight: np.ndarray) -> float:
    """Minimum linear arrangement cost: sum of weight x distance along the order."""
    return float(np.sum(weight * distance))


def two_sum(distance: np.ndarray, weight: np.ndarray) -> float:
    """2-SUM cost: sum of weight x squared distance along the order."""
    return float(np.sum(weight * np.square(distance)))


def ratio_to_random(order: np.ndarray, weight: np.ndarray, cost: Callable) -> float:
    """Cost of `order` over the mean cost of random orders; below 1 is better than chance."""

    def of(order):
        rank = np.argsort(order)
        return cost(np.abs(rank[:, None] - rank[None, :]), weight)

    return of(order) / max(np.mean([of(other) for other in _random_orders(len(order))]), 1e-300)


def link_recall(weight: np.ndarray, edges: tuple[tuple[int, int], ...]) -> float:
    """Share of the known links that the heaviest spanning tree of `weight` contains."""
    tree = set(graph.maximum_spanning_tree(weight))
    return sum((min(edge), max(edge)) in tree for edge in edges) / len(edges)


def connected_growth(order: np.ndarray, edges: tuple[tuple[int, int], ...]) -> float:
    """Share of the steps after the first that write a unit linked to one already written."""
    linked = adjacency(edges, len(order))[np.ix_(order, order)]
    return float(np.tril(linked).any(1)[1:].mean())


def components(edges: tuple[tuple[int, int], ...], n: int) -> np.ndarray:
    """(n,) number of the connected component of each natural position."""
    return scipy.sparse.csgraph.connected_components(adjacency(edges, n), directed=False)[1]


def inner_tau(order: np.ndarray, blocks: np.ndarray) -> float:
    """The lowest |tau| of any block's members, in the order they are written, to natural order.

    A block of one has no order to miss and counts as 1.
    """
    return min(abs(rise(order[blocks[order] == block])) for block in np.unique(blocks))


def adjacent_z(order: np.ndarray, information: np.ndarray) -> float:
    """Mean information of neighbours in `order`, in standard deviations above random orders."""

    def of(order):
        return information[order[1:], order[:-1]].mean()

    random = [of(other) for other in _random_orders(len(order))]
    return (of(order) - np.mean(random)) / max(np.std(random), 1e-12)


def _random_orders(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.permutation(n) for _ in range(RANDOM_ORDERS)]
