"""Generators whose entropy is known: row i is a pure function of (version, law, seed, i).

One law covers them all: a tree over positions, in which each position depends on its parent alone.
A Markov chain is the path, independent units are the tree without edges.
"""

import dataclasses
import functools

import numpy as np
import scipy.special
from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo
from aodiff.data.sources import GeneratedSource, Source, generated_spans

VERSION = 1
LAW, ROWS = range(2)  # second key word: what the random numbers are for

_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def _multiply(a: np.uint64, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """High and low words of the 128-bit product of uint64 values."""
    shift = np.uint64(32)
    a_high, a_low = a >> shift, a & _LOW
    b_high, b_low = b >> shift, b & _LOW
    cross = a_high * b_low + ((a_low * b_low) >> shift)
    other = a_low * b_high + (cross & _LOW)
    return a_high * b_high + (cross >> shift) + (other >> shift), a * b


def philox(key: tuple[int, int], counter: np.ndarray) -> np.ndarray:
    """Philox4x64-10, the generator behind `numpy.random.Philox`, for many counters at once.

    Args:
      key: two 64-bit words.
      counter: (N, 4) uint64.

    Returns:
      (N, 4) uint64 random words.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
    """
    c0, c1, c2, c3 = counter.T
    for i in range(10):
        k0, k1 = (np.uint64((k + i * w) % 2**64) for k, w in zip(key, _WEYL, strict=True))
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(seed: int, purpose: int, rows: np.ndarray, n: int) -> np.ndarray:
    """Returns (len(rows), n) float64 in [0, 1); a row depends on its own number alone."""
    blocks = -(-n // 4)
    counter = np.zeros((len(rows), blocks, 4), np.uint64)
    counter[..., 0] = np.arange(blocks, dtype=np.uint64)
    counter[..., 1] = np.asarray(rows).astype(np.uint64)[:, None]
    words = philox((seed % 2**64, purpose), counter.reshape(-1, 4)).reshape(len(rows), -1)
    return (words[:, :n] >> np.uint64(11)) * 2.0**-53


@dataclasses.dataclass(frozen=True, eq=False)
class TreeLaw:
    """A distribution over rows of L symbols in natural order.

    Attributes:
      parents: (L,) int, parents[i] < i, or -1 for a position that depends on nothing.
      transitions: (L, V, V), transitions[i][a] = law of x_i given that its parent is a. A position
        without parent has its law in every row.
    """

    parents: np.ndarray
    transitions: np.ndarray

    @functools.cached_property
    def _thresholds(self) -> np.ndarray:
        return np.cumsum(self.transitions, axis=-1)[..., :-1]

    @functools.cached_property
    def marginals(self) -> np.ndarray:
        """Law of each position on its own, (L, V)."""
        result = np.zeros(self.transitions.shape[:2])
        for i, parent in enumerate(self.parents):
            result[i] = (
                self.transitions[i][0] if parent < 0 else result[parent] @ self.transitions[i]
            )
        return result

    @property
    def entropy(self) -> float:
        """Exact nats per position: the mean over positions of H(x_i | x_parent)."""
        inner = scipy.special.entr(self.transitions).sum(-1)  # (L, V)
        before = np.stack(
            [np.eye(1, inner.shape[1])[0] if p < 0 else self.marginals[p] for p in self.parents]
        )
        return float((before * inner).sum(-1).mean())

    def sample(self, seed: int, rows: np.ndarray) -> np.ndarray:
        """Rows `rows` (B,) of stream `seed`, (B, L) uint16."""
        draws = uniforms(seed, ROWS, rows, len(self.parents))
        x = np.zeros(draws.shape, np.uint16)
        for i, parent in enumerate(self.parents):
            given = np.zeros(len(x), np.uint16) if parent < 0 else x[:, parent]
            x[:, i] = (draws[:, i, None] >= self._thresholds[i][given]).sum(-1)
        return x


def _path(n: int) -> np.ndarray:
    return np.arange(n) - 1


def _noisy_maps(seed: int, n: int, vocab: int, noise: float, invertible: bool) -> np.ndarray:
    """(n, V, V): a random map of the parent with probability 1 - noise, else uniform."""
    draws = uniforms(seed, LAW, np.arange(n), vocab)
    maps = np.argsort(draws, axis=-1) if invertible else (draws * vocab).astype(np.int64)
    return (1 - noise) * np.eye(vocab)[maps] + noise / vocab


def _uniform_roots(parents: np.ndarray, transitions: np.ndarray) -> TreeLaw:
    transitions[parents < 0] = 1 / transitions.shape[-1]
    return TreeLaw(parents, transitions)


def _dirichlet(seed: int, rows: int, vocab: int, alpha: float) -> np.ndarray:
    gammas = scipy.special.gammaincinv(alpha, uniforms(seed, LAW, np.arange(rows), vocab))
    return gammas / gammas.sum(-1, keepdims=True)


def markov(n: int, config: ConfigDict) -> TreeLaw:
    """Stationary order-1 chain with Dirichlet(alpha) rows (AO-GPT's known-entropy stream)."""
    step = _dirichlet(config.law_seed, config.vocab, config.vocab, config.alpha)
    # pi (T - I) = 0 with sum 1, as one least-squares system.
    system = np.vstack([step.T - np.eye(len(step)), np.ones(len(step))])
    stationary = np.linalg.lstsq(system, np.eye(1, len(step) + 1, len(step))[0], rcond=None)[0]
    transitions = np.broadcast_to(step, (n, *step.shape)).copy()
    transitions[0] = stationary / stationary.sum()
    return TreeLaw(_path(n), transitions)


def chain(n: int, config: ConfigDict) -> TreeLaw:
    """Uniform first unit, then a random permutation of the one before, with noise."""
    maps = _noisy_maps(config.law_seed, n, config.vocab, config.noise, invertible=True)
    return _uniform_roots(_path(n), maps)


def asymmetric_chain(n: int, config: ConfigDict) -> TreeLaw:
    """Like `chain` with many-to-one maps: forwards is easier than backwards."""
    maps = _noisy_maps(config.law_seed, n, config.vocab, config.noise, invertible=False)
    return _uniform_roots(_path(n), maps)


def two_chains(n: int, config: ConfigDict) -> TreeLaw:
    """Two independent chains, one after the other."""
    parents = _path(n)
    parents[n // 2] = -1
    maps = _noisy_maps(config.law_seed, n, config.vocab, config.noise, invertible=True)
    return _uniform_roots(parents, maps)


def tree(n: int, config: ConfigDict) -> TreeLaw:
    """A random recursive tree: the parent of i is uniform among the positions before it."""
    draws = uniforms(config.law_seed, LAW, np.array([n]), n)[0]
    parents = np.floor(draws * np.arange(n)).astype(np.int64)
    parents[0] = -1
    maps = _noisy_maps(config.law_seed, n, config.vocab, config.noise, invertible=True)
    return _uniform_roots(parents, maps)


def iid(n: int, config: ConfigDict) -> TreeLaw:
    """Independent units, each with a Dirichlet(alpha) law of its own: there is no order to find."""
    laws = _dirichlet(config.law_seed, n, config.vocab, config.alpha)
    transitions = np.broadcast_to(laws[:, None], (n, config.vocab, config.vocab))
    return TreeLaw(np.full(n, -1), transitions)


# name, parent, place (x, y); parents come first.
JOINTS = (
    ("pelvis", -1, (0.0, 0.0)),
    ("spine", 0, (0.0, 1.0)),
    ("thorax", 1, (0.0, 2.0)),
    ("neck", 2, (0.0, 2.8)),
    ("head", 3, (0.0, 3.5)),
    ("left shoulder", 2, (-0.9, 2.2)),
    ("left elbow", 5, (-1.5, 1.2)),
    ("left wrist", 6, (-1.9, 0.2)),
    ("right shoulder", 2, (0.9, 2.2)),
    ("right elbow", 8, (1.5, 1.2)),
    ("right wrist", 9, (1.9, 0.2)),
    ("left hip", 0, (-0.5, -0.3)),
    ("left knee", 11, (-0.6, -1.8)),
    ("left ankle", 12, (-0.7, -3.2)),
    ("right hip", 0, (0.5, -0.3)),
    ("right knee", 14, (0.6, -1.8)),
    ("right ankle", 15, (0.7, -3.2)),
)


def skeleton(n: int, config: ConfigDict) -> TreeLaw:
    """Angles of the first n joints in `vocab` equal bins of a turn: uniform for the root, for any
    other joint its parent's plus normal noise with a standard deviation of `noise` radians.

    Raises:
      DataError: there are not that many joints.
    """
    if n > len(JOINTS):
        raise DataError(
            f"data.seq_len is {n}; a skeleton has {len(JOINTS)} joints, use at most that many."
        )
    bins = np.arange(config.vocab)
    turn = (bins[None, :] - bins[:, None]) / config.vocab
    angle = 2 * np.pi * (turn - np.round(turn))
    step = np.exp(-0.5 * np.square(angle / max(config.noise, 1e-3)))
    parents = np.array([parent for _, parent, _ in JOINTS[:n]])
    return _uniform_roots(parents, np.stack([step / step.sum(1, keepdims=True)] * n))


LAWS = {
    "markov": markov,
    "chain": chain,
    "asymmetric_chain": asymmetric_chain,
    "two_chains": two_chains,
    "tree": tree,
    "iid": iid,
    "skeleton": skeleton,
}


def make_law(config: ConfigDict) -> TreeLaw:
    """Returns the law of `config.name`; a pure function of the config."""
    limits = {
        "seq_len": (1, 2**20),
        "vocab": (2, 2**16),
        "alpha": (1e-3, 1e6),
        "noise": (0.0, 1.0),
        "train_rows": (1, 2**30),
        "eval_rows": (1, 2**30),
    }
    for key, (low, high) in limits.items():
        if not low <= config[key] <= high:
            raise DataError(f"data.{key} is {config[key]}; it must be between {low} and {high}.")
    return LAWS[config.name](config.seq_len, config)


def describe(config: ConfigDict) -> DataInfo:
    """The generator of `config`."""
    law = make_law(config)
    joints = JOINTS[: config.seq_len] if config.name == "skeleton" else None
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=config.vocab,
        unit="joint" if joints else "symbol",
        names=joints and tuple(name for name, _, _ in joints),
        edges=tuple((int(p), i) for i, p in enumerate(law.parents) if p >= 0),
        xy=joints and tuple(xy for _, _, xy in joints),
        entropy=law.entropy,
    )


def generated_splits(law: TreeLaw, config: ConfigDict, name: str) -> dict[str, Source]:
    """Rows drawn from `law` by split; `name` states the law and every parameter of it."""
    return {
        split: GeneratedSource(
            sample=functools.partial(law.sample, config.law_seed),
            start=start,
            length=length,
            seq_len=config.seq_len,
            law=name,
        )
        for split, (start, length) in generated_spans(config).items()
    }


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Rows drawn from the generator by split."""
    parameters = (config.vocab, config.alpha, config.noise, config.law_seed, config.seq_len)
    return generated_splits(make_law(config), config, f"{config.name}/{VERSION} {parameters}")
