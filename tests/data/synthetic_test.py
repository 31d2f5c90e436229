"""Generators against numpy's Philox, enumeration, and their exact entropy."""

import hashlib
import itertools

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DataError, describe, open_splits, synthetic


def config(name: str, seq_len: int = 24, vocab: int = 8):
    c = base().data
    c.name, c.seq_len, c.vocab = name, seq_len, vocab
    return c


@pytest.mark.parametrize("key", [(0, 0), (5, 7), (2**64 - 1, 2**63)])
def test_philox_equals_numpy(key):
    counters = np.array([[1, 0, 0, 0], [4, 9, 2**63, 1], [2**64 - 1] * 4], np.uint64)
    for counter, words in zip(counters, synthetic.philox(key, counters), strict=True):
        # numpy raises the counter before it draws.
        before = sum(int(word) << (64 * i) for i, word in enumerate(counter)) - 1
        parts = np.array([(before >> (64 * i)) % 2**64 for i in range(4)], np.uint64)
        reference = np.random.Philox(key=np.array(key, np.uint64), counter=parts)
        assert np.array_equal(words, reference.random_raw(4))


@pytest.mark.parametrize("name", synthetic.LAWS)
def test_rows_are_pure_functions_of_their_number(name):
    law = synthetic.make_law(config(name, seq_len=17))
    together = law.sample(3, np.arange(50))
    assert np.array_equal(law.sample(3, np.array([49, 7, 7])), together[[49, 7, 7]])
    assert not np.array_equal(law.sample(4, np.arange(50)), together)


def probability(law: synthetic.TreeLaw, row: tuple[int, ...]) -> float:
    """Chain rule over the tree, written out."""
    p = 1.0
    for i, parent in enumerate(law.parents):
        p *= law.transitions[i][0 if parent < 0 else row[parent]][row[i]]
    return p


@pytest.mark.parametrize("name", synthetic.LAWS)
def test_entropy_by_enumeration(name):
    law = synthetic.make_law(config(name, seq_len=5, vocab=3))
    p = np.array([probability(law, row) for row in itertools.product(range(3), repeat=5)])
    assert p.sum() == pytest.approx(1, abs=1e-12)
    exact = -(p * np.log(p)).sum() / 5
    assert describe(config(name, seq_len=5, vocab=3)).entropy == pytest.approx(exact, abs=1e-10)


@pytest.mark.parametrize("name", synthetic.LAWS)
def test_samples_follow_the_law(name):
    law = synthetic.make_law(config(name, seq_len=4, vocab=3))
    draws = 20_000
    codes = law.sample(0, np.arange(draws)).astype(int) @ 3 ** np.arange(3, -1, -1)
    rows = itertools.product(range(3), repeat=4)
    expected = draws * np.array([probability(law, row) for row in rows])
    observed = np.bincount(codes, minlength=81)
    common = expected >= 5
    chi2 = ((observed - expected)[common] ** 2 / expected[common]).sum()
    degrees = common.sum() - 1
    # Mean plus four standard deviations of chi-square.
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)


def test_markov_starts_from_its_stationary_law():
    law = synthetic.make_law(config("markov"))
    np.testing.assert_allclose(law.marginals, law.marginals[:1].repeat(24, 0), atol=1e-10)


def test_chain_has_the_published_entropy():
    """N = 24, V = 8, noise 0.3: 1.1278 nats per unit."""
    assert describe(config("chain")).entropy == pytest.approx(1.1278, abs=5e-5)


def test_two_chains_are_independent_and_the_tree_is_a_tree():
    parents = synthetic.make_law(config("two_chains")).parents
    assert parents[12] == -1 and (np.delete(parents, 12) == np.delete(np.arange(24) - 1, 12)).all()
    parents = synthetic.make_law(config("tree")).parents
    assert (parents < np.arange(24)).all() and (parents[1:] >= 0).all() and len(set(parents)) < 24


@pytest.mark.parametrize("name", synthetic.LAWS)
def test_edges_are_the_pairs_that_depend_directly(name):
    """Of all pairs, only linked ones keep their dependence given the rest (enumeration)."""
    c = config(name, seq_len=4, vocab=3)
    law = synthetic.make_law(c)
    rows = itertools.product(range(3), repeat=4)
    log_p = np.log([probability(law, row) for row in rows]).reshape(3, 3, 3, 3)
    linked = set()
    for i, j in itertools.combinations(range(4), 2):
        p = np.moveaxis(log_p, (i, j), (2, 3))
        # Without an interaction of i and j the log probability has no mixed difference.
        mixed = p[..., 1:, 1:] - p[..., :1, 1:] - p[..., 1:, :1] + p[..., :1, :1]
        if abs(mixed).max() > 1e-6:
            linked.add((i, j))
    assert set(describe(c).edges) == linked


def test_a_skeleton_has_names_places_and_noise_in_radians():
    c = config("skeleton", seq_len=17, vocab=16)
    info = describe(c)
    assert len(info.names) == len(info.xy) == 17 and len(info.edges) == 16
    assert ("left elbow", "left wrist") in [(info.names[i], info.names[j]) for i, j in info.edges]
    step = synthetic.make_law(c).transitions[1]
    angle = np.angle(np.exp(2j * np.pi * np.arange(16) / 16))
    np.testing.assert_allclose(step[0] @ angle**2, c.noise**2, rtol=0.02)
    np.testing.assert_allclose(step[5], np.roll(step[0], 5))
    with pytest.raises(DataError, match="data.seq_len is 18; a skeleton has 17 joints"):
        describe(config("skeleton", seq_len=18))


def test_golden_rows():
    """Numbers in papers and checkpoints rest on these rows: a change needs a new VERSION."""
    sizes = dict.fromkeys(synthetic.LAWS, 24) | {"skeleton": 17}
    rows = {n: synthetic.make_law(config(n, k)).sample(0, np.arange(64)) for n, k in sizes.items()}
    found = {n: hashlib.sha256(x.astype("<u2").tobytes()).hexdigest()[:12] for n, x in rows.items()}
    assert found == {
        "markov": "1d4c2b968878",
        "chain": "035bfa4761a8",
        "asymmetric_chain": "1ffa48b5c9b1",
        "two_chains": "59692c4709e8",
        "tree": "1d12fa9f475f",
        "iid": "2f63e84ad35b",
        "skeleton": "4d18a48b7679",
    }


@pytest.mark.parametrize(("key", "value"), [("vocab", 1), ("noise", 1.5), ("alpha", -1.0)])
def test_parameters_out_of_range(key, value):
    c = config("chain")
    c[key] = value
    with pytest.raises(DataError, match=f"data.{key} is {value}; it must be between"):
        describe(c)


def test_splits_do_not_overlap_and_held_out_rows_do_not_follow_train_rows():
    c = config("chain")
    splits = open_splits(c)
    assert {k: len(v) for k, v in splits.items()} == {
        "train": 1_048_576,
        "validation": 1024,
        "test": 1024,
    }
    spans = sorted((s.start, s.start + len(s)) for s in splits.values())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    c.train_rows = 10
    again = open_splits(c)
    rows = np.arange(5)
    assert np.array_equal(again["test"].read(rows)["tokens"], splits["test"].read(rows)["tokens"])
    assert again["test"].fingerprint == splits["test"].fingerprint
    c.noise = 0.5
    assert open_splits(c)["test"].fingerprint != splits["test"].fingerprint
