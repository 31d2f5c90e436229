"""The reciprocal dependency graph: an edge counts only if each unit uses the other (numpy)."""

import numpy as np

RECIPROCAL = {
    "product": lambda a, b: a * b,
    "max": np.maximum,
    "mean": lambda a, b: (a + b) / 2,
    "geometric": lambda a, b: np.sqrt(a * b),
    "min": np.minimum,
}


def mean_excess(excess: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns (n, n) float64, the mean excess attention per exposure, zero on the diagonal.

    Args:
      excess: (n, n) summed excess attention [target, source].
      count: (n, n) number of examples in which the source was visible to the target.
    """
    mean = np.asarray(excess, np.float64) / np.maximum(np.asarray(count, np.float64), 1.0)
    np.fill_diagonal(mean, 0.0)
    return mean


def dependency(excess: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns (n, n) float64 >= 0, the dependency of target (row) on source (column).

    Averaged first and clipped after: irrelevant pairs vanish, so the graph sparsifies itself.

    Source: ordergpt.md section 6.
    """
    return np.maximum(mean_excess(excess, count), 0.0)


def reciprocal_graph(depends: np.ndarray, kind: str = "product") -> np.ndarray:
    """Returns (n, n) float64, the symmetric non-negative graph with zero diagonal.

    Args:
      depends: (n, n) from `dependency`.
      kind: how the two directions of a pair combine, a key of `RECIPROCAL`.

    Raises:
      ValueError: for an unknown kind.

    Source: ordergpt.md section 7.
    """
    if kind not in RECIPROCAL:
        raise ValueError(f"got reciprocal {kind!r}; use one of {', '.join(RECIPROCAL)}")
    graph = RECIPROCAL[kind](depends, depends.T)
    np.fill_diagonal(graph, 0.0)
    return graph


def unit_degree(graph: np.ndarray) -> np.ndarray:
    """Divides a graph by its mean degree (an empty graph stays empty)."""
    degree = graph.sum(1).mean()
    return graph / degree if degree > 0 else graph


def standardise(matrix: np.ndarray) -> np.ndarray:
    """Returns `matrix` (n, n) z-scored over its off-diagonal entries, with zero diagonal."""
    off = ~np.eye(len(matrix), dtype=bool)
    values = matrix[off]
    scaled = (matrix - values.mean()) / max(values.std(), 1e-12)
    return np.where(off, scaled, 0.0)


def maximum_spanning_tree(graph: np.ndarray) -> list[tuple[int, int]]:
    """Returns the n - 1 edges (i, j), i < j, of the heaviest spanning tree (Prim)."""
    n = len(graph)
    inside = np.zeros(n, bool)
    inside[0] = True
    edges = []
    while len(edges) < n - 1:
        weight = np.where(inside[:, None] & ~inside[None, :], graph, -np.inf)
        i, j = np.unravel_index(np.argmax(weight), weight.shape)
        inside[j] = True
        edges.append((int(min(i, j)), int(max(i, j))))
    return edges
