"""The decode loop: numbers and laws of what it reveals, by enumeration on a toy and chi-square."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff.sampling import policies
from aodiff.sampling.denoise import Decoder, decode
from aodiff.sampling.policies import COUNTS, SCORES
from tests.toy_denoiser import MASK, N, conditionals, joint

V = 5
PLACE = np.array([9, 3, 1])  # a row of the toy as a number
RULES = [f"{name}(0.3)" if name in policies.WITH_NUMBER else name for name in COUNTS]


def hashed(tokens, length):
    """Logits (B, C, V + 1) that depend on all live positions and on nothing else."""
    at = np.arange(tokens.shape[1])
    live = at[None] < length[:, None]
    pair = (5 * at[:, None, None] + 3 * at[None, :, None]) * 7.3 + np.arange(V + 1) * 2.9
    seen = jnp.where(live, jnp.cos(tokens * 1.7), 0.0)
    weight = jnp.asarray(np.sin(pair), jnp.float32)
    return 2 * jnp.einsum("bm,mnv->bnv", seen, weight).at[..., V].set(50.0)


@functools.cache
def toy(strength):
    """The toy's conditionals, its mask id raised to V."""
    table = jnp.asarray(conditionals(strength), jnp.float32)

    def denoise(tokens, length):
        return table[tuple(jnp.where(tokens == V, MASK, tokens).T)]

    return denoise


@functools.cache
def compiled(denoise, decoder, **options):
    return jax.jit(
        lambda keys, tokens, given, order: decode(
            denoise, keys, tokens, given, decoder, order=order, mask_id=V, **options
        )
    )


def run(
    decoder, given=None, tokens=None, batch=2, n=8, seed=0, denoise=hashed, order=None, **options
):
    tokens = np.zeros((batch, n), np.int32) if tokens is None else np.asarray(tokens, np.int32)
    given = np.zeros(tokens.shape, bool) if given is None else given
    keys = jax.random.split(jax.random.key(seed), len(tokens))
    return jax.device_get(compiled(denoise, decoder, **options)(keys, tokens, given, order))


def pvalue(tokens, law):
    """Chi-square of rows of the toy against probabilities of `ROWS`."""
    counts = np.bincount(tokens @ PLACE, minlength=27)
    return scipy.stats.chisquare(counts, law * len(tokens)).pvalue


# ---- how many ------------------------------------------------------------------------------------


def counted(name, sizes, steps):
    """Numbers revealed by each step, (len(sizes), steps), by the rule alone."""
    left, found = jnp.asarray(sizes), []
    for used in range(steps):
        budget = policies.Budget(
            left=left,
            size=jnp.asarray(sizes),
            used=jnp.full(len(sizes), used),
            steps=steps,
            width=max(sizes),
            number=0.0,
            passes=None,
            eligible=None,
            keys=None,
        )
        found.append(np.asarray(COUNTS[name](budget)).astype(int))
        left = left - found[-1]
    return np.stack(found, axis=1)


@pytest.mark.parametrize(
    "name, size, expected",
    [
        ("linear", 10, [3, 3, 2, 2]),
        ("dllm", 10, [2, 3, 2, 3]),
        ("dream", 10, [2, 2, 2, 4]),
        ("dream", 8, [0, 1, 1, 1, 1, 1, 1, 2]),
        ("dream", 256, [0, *[1] * 254, 2]),
        ("cosine", 10, [1, 1, 2, 2, 4]),
    ],
)
def test_golden_counts(name, size, expected):
    assert counted(name, [size], len(expected))[0].tolist() == expected


def test_spreading_what_is_left_is_the_table_of_llada():
    """The adaptive rule equals floor(m / T), plus one in the first m mod T steps."""
    sizes = np.arange(1, 80)
    for steps in range(1, 80, 3):
        table = sizes[:, None] // steps + (np.arange(steps)[None] < sizes[:, None] % steps)
        np.testing.assert_array_equal(counted("linear", sizes.tolist(), steps), table)


@pytest.mark.parametrize("schedule", RULES)
def test_every_rule_fills_every_mask_and_leaves_what_is_given(schedule):
    rng = np.random.default_rng(0)
    given, tokens = rng.random((3, 8)) < 0.3, rng.integers(0, V, (3, 8))
    given[2] = True
    out = run(Decoder("confidence", schedule, 3, block=4), given, tokens)
    np.testing.assert_array_equal(out.tokens[given], tokens[given])
    assert np.all(out.tokens < V) and np.array_equal(out.step == -1, given)
    for steps, calls in zip(out.step, out.calls, strict=True):
        assert len(set(steps[steps >= 0])) == calls  # no call in vain
    assert out.calls[2] == 0 and out.widths[2] == 0


def test_threshold_reveals_all_or_one():
    for bar, expected in (("threshold(2)", [1] * 8), ("threshold(0)", [8])):
        out = run(Decoder("confidence", bar, 8))
        assert np.bincount(out.step[0]).tolist() == expected


def test_factor_reveals_the_longest_run_of_confident_ranks():
    chances = np.array([0.9, 0.7, 0.69, 0.76])  # bars 1 - 1 / (r + 1): 1/2, 2/3, 3/4, 4/5
    logits = np.log(np.stack([chances, 1 - chances], axis=1))
    fixed = jnp.asarray(np.pad(logits, ((0, 0), (0, 4)), constant_values=-1e9), jnp.float32)
    out = run(
        Decoder("confidence", "factor(1)", 4),
        n=4,
        denoise=lambda tokens, _: jnp.broadcast_to(fixed[None], (len(tokens), 4, 6)),
        temperature=0.0,
    )
    assert out.step[0].tolist() == [0, 1, 1, 0]  # 0.9, 0.76 pass; 0.7 fails its bar of 3/4


def test_ancestral_calls_the_network_in_steps_that_reveal_something():
    steps, n, num = 5, 8, 1000
    flat = lambda tokens, _: jnp.zeros((*tokens.shape, V + 1))
    out = run(Decoder("random", "ancestral", steps), batch=num, n=n, denoise=flat)
    expected = steps * (1 - (1 - 1 / steps) ** n)
    assert abs(out.calls.mean() - expected) < 4 * out.calls.std() / num**0.5
    counts = np.bincount(out.step.ravel(), minlength=steps)  # each position at a uniform time
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


# ---- which law -----------------------------------------------------------------------------------


def law_of(score, strength):
    """Probabilities of `ROWS` if one position a call is revealed, by sums over all states.

    For "confidence" the choice depends on the proposals, over which it sums too.
    """
    table = conditionals(strength)
    law, states = np.zeros(27), {(MASK,) * N: 1.0}
    proposals = np.array(list(itertools.product(range(N), repeat=N)))
    for _ in range(N):
        following = {}
        for state, mass in states.items():
            logits = jnp.asarray(np.maximum(table[state], -1e9), jnp.float32)[None]
            logits = jnp.broadcast_to(logits, (27, N, 4))
            masked = np.array(state) == MASK
            view = policies.View(logits, logits, jnp.asarray(proposals), keys=None)
            _, place = policies.ranks(
                jnp.zeros((27, N)) if score == "random" else SCORES[score](view),
                jnp.broadcast_to(jnp.asarray(masked)[None], (27, N)),
                jnp.zeros((27, N), bool),
            )
            each = np.where(masked, np.exp(table[state])[np.arange(N), proposals], 1 / N)
            chance = np.prod(each, axis=1)
            at = np.argmin(np.asarray(place), axis=1)
            turns = [at]
            if score == "random":  # each masked position with the same chance
                turns = [np.full(27, i) for i in np.flatnonzero(masked)]
            for turn in turns:
                for i, proposal, c in zip(turn, proposals, chance / len(turns), strict=True):
                    new = (*state[:i], int(proposal[i]), *state[i + 1 :])
                    following[new] = following.get(new, 0.0) + mass * c
        states = following
    for state, mass in states.items():
        law[np.array(state) @ PLACE] = mass
    return law


@pytest.mark.parametrize("score", SCORES)
def test_one_token_a_call_with_exact_conditionals_has_the_exact_law(score):
    """Whatever decides the order from the state; "confidence" looks at the tokens drawn."""
    off = np.abs(law_of(score, 0.0) - joint()).max()
    assert (off < 1e-6) != score.startswith("confidence")


@pytest.mark.parametrize("score", ["entropy", "confidence", "random"])
def test_the_loop_has_the_law_of_its_rules(score):
    """A corrupted denoiser, for which orders differ."""
    out = run(Decoder(score, "linear", N), batch=20_000, n=N, denoise=toy(1.0))
    assert pvalue(out.tokens, law_of(score, 1.0)) > 1e-3
    assert pvalue(out.tokens, law_of("r2l", 1.0)) < 1e-6  # the test can fail
    # The log probabilities of the steps are those of the row in its order.
    assert np.all(np.sort(out.step, axis=1) == np.arange(N))
    if score == "random":
        codes = np.bincount(out.step @ PLACE)
        assert scipy.stats.chisquare(codes[codes > 0]).pvalue > 1e-3 and np.sum(codes > 0) == 6


def test_log_probabilities_add_up_to_that_of_the_row():
    out = run(Decoder("margin", "linear", N), batch=64, n=N, denoise=toy(0.0), temperature=2.0)
    np.testing.assert_allclose(out.logp.sum(1), np.log(joint()[out.tokens @ PLACE]), atol=1e-4)


def test_all_at_once_draws_from_the_product_of_the_marginals():
    marginal = np.exp(conditionals(0.0)[(MASK,) * N])[:, :N]
    product = np.einsum("a,b,c->abc", *marginal).reshape(-1)
    assert np.sum(joint() * np.log(joint() / product)) == pytest.approx(0.270311, abs=1e-6)
    out = run(Decoder("confidence", "linear", 1), batch=20_000, n=N, denoise=toy(0.0))
    assert pvalue(out.tokens, product) > 1e-3 and pvalue(out.tokens, joint()) < 1e-6


def test_ancestral_with_many_steps_is_a_random_order():
    out = run(Decoder("random", "ancestral", 200), batch=8000, n=N, denoise=toy(1.0))
    assert pvalue(out.tokens, law_of("random", 1.0)) > 1e-3
    assert pvalue(out.tokens, law_of("entropy", 1.0)) < 1e-3


def test_noise_on_positions_draws_them_without_replacement():
    score, noise = np.array([0.3, 1.0, 0.0]), 0.7
    policy = lambda logits, masked, *_: jnp.broadcast_to(jnp.asarray(score)[None], masked.shape)
    out = run(
        Decoder("policy", "linear", 2, noise=noise),
        batch=20_000,
        n=N,
        denoise=toy(0.0),
        policy=policy,
    )  # two positions, then one
    weight = np.exp(score / noise)
    last = np.zeros(N)
    for a, b in itertools.permutations(range(N), 2):
        last[N - a - b] += weight[a] / weight.sum() * weight[b] / (weight.sum() - weight[a])
    counts = np.bincount(np.argmax(out.step, axis=1), minlength=N)
    assert scipy.stats.chisquare(counts, last * len(out.step)).pvalue > 1e-3


# ---- blocks, ties, ends --------------------------------------------------------------------------


def test_blocks_come_in_turn_and_one_position_blocks_are_left_to_right():
    whole, none = (run(Decoder("margin", "linear", 4, block)) for block in (8, 0))
    np.testing.assert_array_equal(whole.tokens, none.tokens)
    out = run(Decoder("confidence", "linear", 2, 4))
    assert np.all(out.step[:, :4].max(1) < out.step[:, 4:].min(1))
    one = run(Decoder("confidence", "linear", 1, 1), temperature=0.0)
    order = np.tile(np.arange(8), (2, 1))
    l2r = run(Decoder("order", "linear", 8), temperature=0.0, order=order)
    np.testing.assert_array_equal(one.tokens, l2r.tokens)
    np.testing.assert_array_equal(l2r.step, order)


def test_blocks_begin_behind_the_prompt_of_each_row():
    prompt = np.array([2, 3, 0])
    given = np.arange(8)[None] < prompt[:, None]
    out = run(Decoder("confidence", "linear", 1, 2), given, np.zeros((3, 8), int))
    assert out.step.tolist() == [
        [-1, -1, 0, 0, 1, 1, 2, 2],
        [-1, -1, -1, 0, 0, 1, 1, 2],
        [0, 0, 1, 1, 2, 2, 3, 3],
    ]


def hashed_at(tokens, length, at):
    return jnp.take_along_axis(hashed(tokens, length), at[..., None], axis=1)


@pytest.mark.parametrize("score, schedule", [("confidence", "linear"), ("order", "one")])
def test_only_the_block_needs_to_be_predicted(score, schedule):
    """Growth that grows nothing has all positions predicted; the last blocks are cut short."""
    decoder = Decoder(score, schedule, 2, 4, late=(2,), crop=(4,))
    given = np.arange(8)[None] < np.array([0, 3, 5, 8])[:, None]
    order = np.tile(np.arange(8)[::-1], (4, 1)) if score == "order" else None
    args = decoder, given, np.full((4, 8), 3)
    whole = run(*args, order=order, grow=identity)
    for some in (run(*args, order=order), run(*args, order=order, denoise_at=hashed_at)):
        np.testing.assert_array_equal(some.tokens, whole.tokens)
        np.testing.assert_array_equal(some.step, whole.step)
        np.testing.assert_array_equal(some.calls, whole.calls)
        np.testing.assert_allclose(some.logp, whole.logp, atol=1e-5)


def identity(state, logits, keys):
    return state, logits


def test_ties_go_to_the_left():
    flat = jnp.zeros((1, 8, V))
    view = policies.View(flat, flat, jnp.zeros((1, 8), jnp.int32), keys=None)
    for score in set(SCORES) - {"random", "r2l"}:
        _, place = policies.ranks(
            SCORES[score](view), jnp.ones((1, 8), bool), jnp.zeros((1, 8), bool)
        )
        np.testing.assert_array_equal(place[0], np.arange(8))
    out = run(
        Decoder("margin", "linear", 4),
        denoise=lambda tokens, _: jnp.zeros((*tokens.shape, V + 1)),
        temperature=0.0,
    )
    np.testing.assert_array_equal(out.step[0], np.arange(8) // 2)


def test_the_mask_and_kept_out_ids_are_never_drawn():
    for temperature in (0.0, 9.0):
        out = run(Decoder("margin", "linear", 2, suppress=(2,)), batch=64, temperature=temperature)
        assert not np.any((out.tokens == 2) | (out.tokens == V))
        assert {0, 1, 3, 4} == set(out.tokens.ravel().tolist()) or temperature == 0


@pytest.mark.parametrize("schedule", ["linear", "threshold(0.5)"])
def test_late_ids_are_revealed_last_and_never_stall(schedule):
    favour = np.array([0, 5, 0, 5, 5, 0, 0, 5.0])  # id 4 is certain at half of the positions

    def denoise(tokens, length):
        logits = jnp.zeros((*tokens.shape, V + 1)).at[..., 1].set(1.0)
        return logits.at[..., 4].add(jnp.asarray(favour)[None])

    for given in (None, np.tile(favour == 0, (2, 1))):
        out = run(
            Decoder("confidence", schedule, 8, late=(4,)),
            given,
            np.ones((2, 8)),
            denoise=denoise,
            temperature=0.0,
        )
        ends = out.tokens == 4
        np.testing.assert_array_equal(ends, np.tile(favour > 0, (2, 1)))
        assert np.where(ends, -1, out.step).max() < np.where(ends, out.step, 99).min()


def end_at(position, certain):
    """Id 4 at a position and id 3 elsewhere, with these probabilities' logits."""

    def denoise(tokens, length):
        logits = jnp.zeros((*tokens.shape, V + 1)).at[..., 3].set(1.0)
        return logits.at[:, position, 4].set(certain)

    return denoise


def test_a_row_ends_at_its_first_end_and_what_is_masked_before_is_filled_at_once():
    decoder = Decoder("confidence", "linear", 8, crop=(4,))
    out = run(decoder, denoise=end_at(5, 9.0), temperature=0.0)
    assert out.lengths.tolist() == [6, 6] and out.calls.tolist() == [2, 2]
    np.testing.assert_array_equal(out.tokens, np.tile([3, 3, 3, 3, 3, 4, 0, 0], (2, 1)))
    np.testing.assert_array_equal(out.step, np.tile([1, 1, 1, 1, 1, 0, -1, -1], (2, 1)))
    assert out.widths.tolist() == [14, 14] and out.squares.tolist() == [100, 100]
    whole = run(decoder, denoise=end_at(7, 9.0), temperature=0.0)  # nothing comes after it
    assert whole.lengths.tolist() == [8, 8] and whole.calls.tolist() == [8, 8]


def test_crop_changes_nothing_before_the_end_of_a_row_written_from_the_left():
    given = np.arange(64)[:, None] == np.zeros((1, 8))  # what a row did not write ends nothing
    args = given, np.full((64, 8), 4)
    plain = run(Decoder("l2r", "linear", 4), *args, temperature=1.5)
    cropped = run(Decoder("l2r", "linear", 4, crop=(4,)), *args, temperature=1.5)
    for row in range(1, 64):
        before, n = plain.tokens[row], cropped.lengths[row]
        ends = np.flatnonzero(before == 4)
        assert n == (ends[0] + 1 if len(ends) else 8)
        assert cropped.calls[row] == -(-n // 2)  # it stops on its own
        np.testing.assert_array_equal(cropped.tokens[row], np.where(np.arange(8) < n, before, 0))
    assert len(set(cropped.lengths.tolist())) > 3 and cropped.lengths[0] == 8


# ---- rows ----------------------------------------------------------------------------------------

DECODERS = {
    "margin": Decoder("margin", "threshold(0.6)", 8),
    "random": Decoder("random", "linear", 3, noise=0.5, crop=(4,)),
    "ancestral": Decoder("random", "ancestral", 6),
    "blocks": Decoder("confidence", "dream", 3, block=4, late=(4,)),
    "topk": Decoder("confidence", "linear", 3, remask="topk", noise=0.5),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_row_does_not_depend_on_its_batch_or_on_padding(name):
    rng = np.random.default_rng(0)
    given, tokens = rng.random((4, 8)) < 0.4, rng.integers(0, V, (4, 8))
    length = np.array([8, 5, 6, 3])
    keys = jax.random.split(jax.random.key(3), 4)
    fn = jax.jit(
        lambda keys, tokens, given, length: decode(
            hashed, keys, tokens, given, DECODERS[name], mask_id=V, length=length
        )
    )
    whole = jax.device_get(fn(keys, *map(jnp.asarray, (tokens, given, length))))
    for row, n in enumerate(length):
        live = np.arange(8) < n
        assert np.all(whole.tokens[row][~live] == 0) and np.all(whole.step[row][~live] == -1)
        assert np.all(whole.tokens[row] < V) and whole.lengths[row] <= n
    wide = [np.pad(x, ((0, 0), (0, 3)), constant_values=1) for x in (tokens, given)]
    for rows, parts in (([3, 0, 2, 1], (tokens, given)), ([1], wide)):
        at = np.array(rows)
        part = fn(keys[at], *(jnp.asarray(x[at]) for x in (*parts, length)))
        np.testing.assert_array_equal(part.tokens[:, :8], whole.tokens[at])
        np.testing.assert_array_equal(part.step[:, :8], whole.step[at])
        for field in ("calls", "lengths", "widths", "squares"):
            np.testing.assert_array_equal(getattr(part, field), getattr(whole, field)[at])


def test_one_program_without_transfers_serves_all_prompts_of_a_capacity():
    fn = jax.jit(
        lambda keys, tokens, given, length: decode(
            hashed, keys, tokens, given, DECODERS["margin"], mask_id=V, length=length
        )
    )
    keys, tokens = jax.random.split(jax.random.key(0), 2), jnp.ones((2, 8), jnp.int32)
    cases = [
        (jnp.arange(8)[None] < jnp.array([[p], [q]]), jnp.array([n, 8]))
        for p, q, n in ((0, 0, 8), (3, 1, 5), (8, 2, 8))
    ]
    text = str(jax.make_jaxpr(fn)(keys, tokens, *cases[0]))
    assert text.count("callback") == 0 and text.count("while[") == 1
    with jax.transfer_guard("disallow"):
        for case in cases:
            jax.block_until_ready(fn(keys, tokens, *case))
    assert fn._cache_size() == 1


def test_a_given_mask_id_stays():
    given = np.tile(np.arange(8) == 3, (2, 1))
    out = run(Decoder("margin", "linear", 7), given, np.full((2, 8), V))
    np.testing.assert_array_equal(out.tokens == V, given)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, choices",
    [
        ("confidence, .* order, policy", dict(score="best")),
        ("linear, cosine", dict(schedule="fast")),
        ("threshold\\(0.9\\)", dict(schedule="threshold")),
        ("linear, cosine", dict(schedule="linear(3)")),
        ("noise -1", dict(noise=-1.0)),
        ("topk, p2", dict(remask="all")),
        ("needs confidence", dict(remask="p2", score="policy")),
        ("1.2.3.* is unknown", dict(schedule="threshold(1.2.3)")),
        ("needs confidence", dict(remask="p2", schedule="threshold(0.9)")),
        ("blocks, crop", dict(remask="topk", crop=(1,))),
        ("divisor", dict(block=3)),
        ("up to 8", dict(steps=9)),
        ("up to 8", dict(steps=3, block=2)),
        ("sample.steps=0", dict(steps=0)),
    ],
)
def test_bad_choices_are_one_sentence(words, choices):
    with pytest.raises(ValueError, match=words):
        Decoder(**(dict(score="confidence", schedule="linear", steps=4) | choices)).check(8)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="pass order exactly when"):
        run(Decoder("order", "linear", 8))
    with pytest.raises(ValueError, match="pass policy exactly when"):
        run(Decoder("margin", "linear", 8), policy=lambda *a: 0)
    for decoder in (
        Decoder("confidence", "linear", 4, remask="p2"),
        Decoder("margin", "cosine", 4),
        Decoder("margin", "dream", 4),
    ):
        assert decoder.monotone != bool(decoder.remask)
        with pytest.raises(ValueError, match="rows cannot grow"):
            run(decoder, grow=identity)


def test_a_given_suffix_is_never_cut_off():
    def ends(tokens, length):
        """Sure of the end, id 2, everywhere."""
        return jnp.broadcast_to(20.0 * (jnp.arange(V + 1) == 2), (*tokens.shape, V + 1))

    given = np.arange(8)[None] >= [[6], [8]]
    out = run(Decoder("l2r", "one", 8, crop=(2,)), given, np.full((2, 8), 1), denoise=ends)
    assert out.lengths.tolist() == [8, 1] and out.tokens[0, 6:].tolist() == [1, 1]
