"""Entropies and orders read off the training rows alone, without a model (numpy)."""

import numpy as np

from aodiff.core import spectral

ROWS = 16384  # rows that callers should pass at most: about a second for 64 units


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the law behind `counts` (any shape), 0 without any count.

    The plug-in estimate plus (occupied cells - 1) / (2 samples). Source: Miller 1955 (Madow).
    """
    counts = counts[counts > 0]
    total = counts.sum()
    if not total:
        return 0.0
    share = counts / total
    return float(-np.sum(share * np.log(share)) + (len(counts) - 1) / (2 * total))


def marginal_entropies(tokens: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Returns (L,) float64, the entropy of each unit over the rows in which it is present.

    Args:
      tokens: (rows, L) ids.
      present: (rows, L) bool, False where a cell is missing.
    """
    return np.array([entropy(np.bincount(x[p])) for x, p in zip(tokens.T, present.T, strict=True)])


def mutual_information(tokens: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Returns (L, L) float64 >= 0 in nats, symmetric with zero diagonal.

    Every pair is counted over the rows that have both units; only cells that occur are stored, so
    that the vocabulary may be large. The correction of `entropy` makes independent units 0 on
    average, and what then falls below 0 is set to it.

    Args:
      tokens: (rows, L) ids, at most `ROWS` rows for a quick answer.
      present: (rows, L) bool.
    """
    n, base = tokens.shape[1], int(tokens.max(initial=0)) + 1
    columns = np.ascontiguousarray(tokens.T, np.int64)
    information = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            both = present[:, i] & present[:, j]
            code, count = np.unique((columns[i] * base + columns[j])[both], return_counts=True)
            first, second = np.bincount(code // base, count), np.bincount(code % base, count)
            information[i, j] = entropy(first) + entropy(second) - entropy(count)
    return np.maximum(information + information.T, 0.0)


def mi_fiedler_order(tokens: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Returns (L,) int64: the spectral line through the mutual information of all pairs.

    Either direction of a line is as good; without any information it is the order of the units.

    Source: ordergpt.md section 16.
    """
    line = spectral.seriate(mutual_information(tokens, present))
    return np.arange(tokens.shape[1]) if line is None else line.order


def greedy_entropy_order(tokens: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Returns (L,) int64: first the unit of lowest entropy, then always the one that is easiest.

    Easiest is the lowest entropy given the single placed unit that tells most about it.
    """
    alone = marginal_entropies(tokens, present)
    given = alone[:, None] - mutual_information(tokens, present)  # [unit, placed unit]
    cost, order = alone.copy(), []
    for _ in range(len(alone)):
        unit = int(np.argmin(cost))
        order.append(unit)
        cost = np.minimum(cost, given[:, unit])
        cost[order] = np.inf
    return np.array(order, np.int64)


ORDERS = {"mi_fiedler": mi_fiedler_order, "greedy_entropy": greedy_entropy_order}
