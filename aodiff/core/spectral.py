"""The spectral teacher: a line through the dependency graph, in float64 on the host.

CPU milliseconds of `fiedler` on a hidden path (decay exp(-1), background 0.05; one core):

| units | 64 | 128 | 256 | 512 | 1024 | 2048 |
| --- | --- | --- | --- | --- | --- | --- |
| dense (numpy.linalg.eigh) | 0.3 | 1.1 | 5.2 | 29 | 181 | 1207 |
| iterative (scipy eigsh, shift-invert with a Cholesky factor) | 0.5 | 0.7 | 2.1 | 10 | 33 | 199 |
"""

import dataclasses
import functools

import numpy as np

from aodiff.core import graph as graphs

SPLIT = 0.1  # below this lambda_2 / lambda_3 the Fiedler vector tells parts apart, not units
DENSE = 128  # units above which an iterative solver is cheaper, see the table above
EDGE = 1e-9  # of the mean degree; below it there is no edge
FACING = 4  # units on each side of a junction that decide how two parts are joined


@dataclasses.dataclass(frozen=True)
class Seriation:
    """A line through a graph.

    order: (n,) int64, order[s] is the unit at place s (either direction is equally good).
    priority: (n,) float64 in [0, 1], larger is earlier.
    parts: the units of each separately seriated piece, in the order of the line; a single one means
      that the graph itself fixes the whole line.
    lambda_2, lambda_3: the two smallest non-zero Laplacian eigenvalues of the whole graph.
    """

    order: np.ndarray
    priority: np.ndarray
    parts: tuple[np.ndarray, ...]
    lambda_2: float
    lambda_3: float

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    def reverse(self) -> "Seriation":
        """Returns the same line read from the other end."""
        return dataclasses.replace(
            self,
            order=self.order[::-1],
            priority=1.0 - self.priority,
            parts=tuple(part[::-1] for part in self.parts[::-1]),
        )


def fiedler(graph: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Returns the Fiedler vector (n,), lambda_2 and lambda_3 of the unnormalised Laplacian D - W.

    Args:
      graph: (n, n) symmetric, non-negative, zero diagonal, n >= 3.

    Source: Atkins, Boman and Hendrickson 1998: the vector is monotone along a Robinson matrix, and
    a uniform background leaves it unchanged.
    """
    n = len(graph)
    off = ~np.eye(n, dtype=bool)
    # A background c moves every eigenvalue by c n; without it their ratios are those of the signal.
    background = graph[off].min()
    clean = np.where(off, graph - background, 0.0)
    degree = clean.sum(1)
    # The constant vector, lifted above every other, stays out of a degenerate null space.
    lift = 2.0 * degree.max() or 1.0
    laplacian = np.diag(degree) - clean + lift / n
    # Threads of a small factorization wait for cores that training keeps busy: 200 ms, not 0.2.
    with _blas().limit(limits=1, user_api="blas"):
        if n <= DENSE:
            values, vectors = np.linalg.eigh(laplacian)
        else:
            values, vectors = _lowest_two(laplacian, shift=1e-10 * lift)
    lambda_2, lambda_3 = (values[:2] + background * n).tolist()
    return vectors[:, 0], lambda_2, lambda_3


@functools.cache
def _blas():
    """The BLAS libraries in use, found once: that takes longer than small eigenvectors."""
    import scipy.linalg  # noqa: F401  (its own must be there to be found)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _lowest_two(matrix: np.ndarray, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """The two lowest eigenvalues (2,) and eigenvectors (n, 2) of a positive semi-definite matrix.

    Shift-invert Lanczos: the inverse stretches the low end of the spectrum, whose relative gap is
    of order 1 / n^2 for a chain. Start and restarts are seeded, so that a resumed run repeats it.
    """
    from scipy import linalg
    from scipy.sparse.linalg import LinearOperator, eigsh

    n = len(matrix)
    factor = linalg.cho_factor(matrix + shift * np.eye(n), overwrite_a=True)
    inverse = LinearOperator((n, n), lambda x: linalg.cho_solve(factor, x), dtype=matrix.dtype)
    seeded = np.random.default_rng(0)
    values, vectors = eigsh(
        matrix, k=2, sigma=-shift, OPinv=inverse, v0=seeded.standard_normal(n), rng=seeded
    )
    ascending = np.argsort(values)
    return values[ascending], vectors[:, ascending]


def soft_rank(values: np.ndarray) -> np.ndarray:
    """Returns ranks in [0, 1] that space units evenly but keep near-ties near.

    Plain min-max scaling would crowd both ends, where a path's Fiedler vector (a cosine) is flat.
    """
    scale = 0.02 * max(float(np.ptp(values)), 1e-300)
    difference = np.clip((values[:, None] - values[None, :]) / scale, -700, 700)
    rank = np.sum(1.0 / (1.0 + np.exp(-difference)), axis=1)
    return (rank - rank.min()) / max(float(np.ptp(rank)), 1e-300)


def _junction(left: np.ndarray, right: np.ndarray, weak: np.ndarray) -> float:
    """Weak affinity between the end of `left` and the beginning of `right`."""
    ends, starts = left[::-1][:FACING], right[:FACING]
    distance = np.arange(len(ends))[:, None] + np.arange(len(starts))[None, :]
    return float(np.sum(weak[np.ix_(ends, starts)] / (1.0 + distance)))


def _arrange(units: np.ndarray, graph: np.ndarray, weak: np.ndarray) -> list[np.ndarray]:
    """Recursive seriation of `units`: their parts, which make the line one after the other."""
    if len(units) <= 2:
        return [units]
    pieces = _pieces(units, graph)
    if len(pieces) > 1:
        return _in_line([_arrange(piece, graph, weak) for piece in pieces], weak)
    vector, lambda_2, lambda_3 = fiedler(graph[np.ix_(units, units)])
    line = np.argsort(vector, kind="stable")
    if lambda_2 >= SPLIT * lambda_3:
        return [units[line]]
    cut = int(np.argmax(np.diff(vector[line]))) + 1
    # Recursion is on units in index order, so that a part's line depends on the part alone.
    left = _arrange(np.sort(units[line[:cut]]), graph, weak)
    right = _arrange(np.sort(units[line[cut:]]), graph, weak)
    choices = [a + b for a in (left, _turn(left)) for b in (right, _turn(right))]
    ends = len(left)
    return max(choices, key=lambda c: _junction(*map(np.concatenate, (c[:ends], c[ends:])), weak))


def _pieces(units: np.ndarray, graph: np.ndarray) -> list[np.ndarray]:
    """The connected components of `units`, each in index order."""
    from scipy.sparse.csgraph import connected_components

    num, label = connected_components(graph[np.ix_(units, units)] > EDGE, directed=False)
    return [units[label == i] for i in range(num)]


def _in_line(pieces: list[list[np.ndarray]], weak: np.ndarray) -> list[np.ndarray]:
    """Arranges pieces that no edge joins by their mean weak affinity, and turns each to fit.

    One seriation of the pieces, however many: a Fiedler vector of all units would have to tell them
    apart one by one.
    """
    whole = [np.concatenate(piece) for piece in pieces]
    member = np.zeros((len(pieces), len(weak)))
    for row, units in zip(member, whole, strict=True):
        row[units] = 1 / len(units)
    between = member @ weak @ member.T
    np.fill_diagonal(between, 0.0)
    line = range(len(pieces))
    if between.any():
        line = np.concatenate(_arrange(np.arange(len(pieces)), between / between.mean(), between))
    ways = [(0.0, [])]  # the best line that ends in either direction of the last piece
    for piece in (pieces[i] for i in line):
        ways = [_append(ways, turned, weak) for turned in (piece, _turn(piece))]
    return max(ways, key=lambda way: way[0])[1]


def _append(ways, piece: list[np.ndarray], weak: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """The best of (score, parts) with `piece` after it."""
    right = np.concatenate(piece)
    longer = [
        (score + (_junction(np.concatenate(parts), right, weak) if parts else 0.0), parts + piece)
        for score, parts in ways
    ]
    return max(longer, key=lambda way: way[0])


def _turn(parts: list[np.ndarray]) -> list[np.ndarray]:
    return [part[::-1] for part in parts[::-1]]


def seriate(graph: np.ndarray, weak: np.ndarray | None = None) -> Seriation | None:
    """Finds the line of `graph`, or None where the graph has no edge at all.

    Args:
      graph: (n, n) symmetric, non-negative, zero diagonal; any scale.
      weak: (n, n) affinities that place parts which the graph does not connect, normally the mean
        excess before clipping; symmetrised and shifted to be non-negative here.

    Source: ordergpt.md sections 8.1 to 8.4 (recursive spectral seriation, soft-rank priorities).
    """
    n = len(graph)
    degree = graph.sum(1).mean()
    if not degree > 0 or n < 3:
        return None
    weak = np.zeros_like(graph) if weak is None else (weak + weak.T) / 2
    off = ~np.eye(n, dtype=bool)
    weak = np.where(off, weak - weak[off].min(), 0.0)
    graph = graph / degree
    parts = _arrange(np.arange(n), graph, weak)
    vector, lambda_2, lambda_3 = fiedler(graph)
    line = np.concatenate(parts)
    rank = np.argsort(line) / (n - 1.0) if len(parts) > 1 else soft_rank(vector)
    priority = 1.0 - rank
    order = np.argsort(-priority, kind="stable")
    return Seriation(order, priority, tuple(parts), lambda_2, lambda_3)


def teach(excess: np.ndarray, count: np.ndarray, reciprocal: str) -> Seriation | None:
    """The line of the evidence, or None where it holds no graph.

    Args:
      excess, count: (n, n) sums of excess attention and exposures [target, source].
      reciprocal: how the graph joins both directions of a pair, a key of `graph.RECIPROCAL`.
    """
    depends = graphs.dependency(excess, count)
    weak = graphs.mean_excess(excess, count)
    return seriate(graphs.reciprocal_graph(depends, reciprocal), weak)
