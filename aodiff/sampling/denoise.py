"""Decoding of masked diffusion models: one jitted loop, decoders as choices of its parts.

A step predicts every masked position, may let the row grow, ranks the eligible positions (the
score), says how many to reveal (the schedule) and reveals those. Rows never touch each other: each
has its own length, block, count of steps and random key. Source: decoding.md sections 2 to 7.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from aodiff import rng
from aodiff.core import categorical
from aodiff.sampling import cache, policies, remask
from aodiff.sampling.policies import COUNTS, SCORES
from aodiff.sampling.samples import Samples
from aodiff.sampling.state import (
    State,
    advance,
    begin,
    check_buckets,
    in_block,
    live,
    masked_positions,
    narrowed,
    spend,
    widened,
)

# tokens (B, C) int32, length (B,) int32 -> logits (B, C, V) float32; positions at or beyond the
# length must be invisible; ids that may not be emitted are at or below -1e8.
Denoise = Callable[[jax.Array, jax.Array], jax.Array]
# The same with positions at (B, w) int32 -> their logits (B, w, V) alone.
DenoiseAt = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# logits (B, C, V), masked and given (B, C) bool, length (B,) -> scores (B, C), higher is earlier.
Policy = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# state, logits, keys (B,) -> state, logits: may insert masks and then return the logits of the
# longer rows. Counts the calls it makes by `spend`, moves `block_end` with an insertion in the
# block, and leaves rows alone that are `done` or `cropped`.
Grow = Callable[["State", jax.Array, jax.Array], tuple["State", jax.Array]]
# lengths (B,) int32 -> the greatest lengths (B,) that a step of `Grow` may give these rows.
Reach = Callable[[jax.Array], jax.Array]

MASKED = -1e9  # logit of an id that may not be drawn
_TOKEN, _SCORE, _COUNT, _PLACE, _GROW = range(5)  # streams of a step's key


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The choices of a decoder.

    Attributes:
      score: a key of `SCORES`, or "order" or "policy", which `decode` is then given.
      schedule: a key of `COUNTS`. "threshold(p)" reveals as many as have probability p or more,
        "factor(f)" the longest run of ranks r = 1, 2, ... of probability 1 - f / (r + 1) or more
        (Fast-dLLM), both at least one.
      steps: network calls of a block without given positions; with `block=0` of the row.
      block: width of the blocks that are revealed in turn, the first of which begins at the first
        position that is not given; 0 is no blocks.
      noise: temperature of the choice of positions: they are drawn without replacement from the
        softmax of score / noise (Dream's alg_temp); 0 takes the best.
      remask: a key of `remask.KINDS`, decoders that take tokens back: then positions may be masked
        again until the last step, so that neither policies nor caches nor growth apply.
      suppress: ids that are never drawn (LLaDA's logits_eos_inf).
      late: ids whose positions are revealed last, and which the others' confidence leaves out
        (LLaDA's confidence_eos_eot_inf).
      crop: ids that end a row: what comes after is cut off, and the next step of the row fills
        what is masked before it by the most likely tokens.
      refresh: calls after which a row's cache is renewed, as it is when the row begins a block; in
        between the block alone is computed (`cache`). 1 is exact, 0 is no cache.
      buckets: widths below that of the rows, ascending. Steps are computed at the first that holds
        all that the rows which are not done may be after the step, so that short rows are cheap;
        logits differ by rounding alone.
    """

    score: str
    schedule: str
    steps: int
    block: int = 0
    noise: float = 0.0
    remask: str = ""
    suppress: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    crop: tuple[int, ...] = ()
    refresh: int = 0
    buckets: tuple[int, ...] = ()

    def __post_init__(self):
        names = (*SCORES, "order", "policy")
        if self.score not in names:
            raise ValueError(f"score {self.score!r} is unknown; use one of {', '.join(names)}")
        name, _ = self.rule
        if name not in COUNTS:
            known = [f"{n}(0.9)" if n in policies.WITH_NUMBER else n for n in COUNTS]
            raise ValueError(
                f"sample.schedule={self.schedule!r} is unknown; use one of {', '.join(known)}"
            )
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"position noise {self.noise} is not allowed; give 0 (none) or more")
        if self.remask:
            remask.check(self)
        if self.refresh < 0 or (self.refresh and (not self.block or self.score == "policy")):
            raise ValueError(
                f"sample.refresh={self.refresh} with blocks of {self.block} and score "
                f"{self.score!r}; give a number of calls with blocks and any score but the policy, "
                "which looks at all positions, or 0 for no cache"
            )
        if self.buckets and (self.refresh or self.score == "policy"):
            raise ValueError(
                f"sample.buckets={self.buckets} with refresh={self.refresh} and score "
                f"{self.score!r}; a cache and a policy are of whole rows, use ()"
            )

    def check(self, n: int) -> None:
        """Raises ValueError for choices that do not fit rows of n positions."""
        blocks = num_blocks(self.block, n)
        width = n // blocks
        check_buckets(self.buckets, n)
        limited = self.rule[0] in policies.AT_MOST_ONE_CALL_A_TOKEN and not self.remask
        if self.steps < 1 or (limited and self.steps > width):
            raise ValueError(
                f"sample.steps={self.steps * blocks} with {blocks} blocks of {width}; use a "
                f"multiple of {blocks} up to {n}, at least one call a block and one token a call"
            )

    @property
    def rule(self) -> tuple[str, float]:
        """Name and number of the schedule."""
        match = re.fullmatch(r"(\w+)\((\d*\.?\d+)\)", self.schedule)
        name, number = (match[1], float(match[2])) if match else (self.schedule, 0.0)
        return (name if bool(match) == (name in policies.WITH_NUMBER) else "", number)

    @property
    def monotone(self) -> bool:
        """Whether a revealed token is final."""
        return not self.remask


def num_blocks(block: int, n: int) -> int:
    """How many blocks of width `block`, 0 for one block, make up n positions; raises ValueError."""
    if block < 0 or (block and n % block):
        raise ValueError(
            f"sample.block={block} does not divide the {n} positions of a row; use a divisor, or 0 "
            "for no blocks"
        )
    return n // (block or n)


def decode(
    denoise: Denoise,
    keys: jax.Array,
    tokens: jax.Array,
    given: jax.Array,
    decoder: Decoder,
    *,
    mask_id: int,
    length: jax.Array | None = None,
    order: jax.Array | None = None,
    policy: Policy | None = None,
    grow: Grow | None = None,
    reach: Reach | None = None,
    denoise_at: DenoiseAt | None = None,
    cached: cache.Cached | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Samples:
    """Fills the positions that are not given; a row depends on its own key and tokens only.

    May be called under `jit`; one program serves all prompts and lengths of a capacity C.

    Args:
      denoise: logits of partly masked rows.
      keys: (B,) typed keys.
      tokens: (B, C) int32; entries that are not given are ignored. given: (B, C) bool.
      length: (B,) int32 live positions of each row, None: all. The others stay 0.
      order: (B, C) int32 permutations for the score "order".
      policy: scores of the positions for the score "policy".
      grow: lets rows grow, up to C. reach: how far in one step, None: up to C.
      denoise_at: used in place of `denoise` where only the block is looked at: with blocks, and
        neither policy nor growth.
      cached: used in place of both by a decoder with `refresh`.
      temperature, top_p, top_k: of the tokens, see `categorical.shape`; temperature 0 is greedy.

    Returns:
      Samples; `step` is the step of the row that filled a position, `logp` the log probability of
      the token then, before temperature and truncation.

    Raises:
      ValueError: a decoder without what its score asks for, growth with a decoder that cannot
        grow, `refresh` without `cached`.
    """
    _check_parts(decoder, order, policy, grow, cached)
    rank = None if order is None else jnp.argsort(order, axis=1).astype(jnp.float32)
    start = begin(tokens, given, block=decoder.block, mask_id=mask_id, length=length)
    windows = bool(decoder.block) and policy is None and grow is None

    def step(carry: tuple[State, cache.Store | None]) -> tuple[State, cache.Store | None]:
        state, store = carry
        capacity = state.tokens.shape[1]
        if decoder.rule[0] in policies.MAY_REVEAL_NONE:
            state = _skip_idle(state, keys, decoder, mask_id)
        step_keys = jax.vmap(jax.random.fold_in)(keys, state.step)
        at = jnp.zeros_like(state.length)[:, None] + jnp.arange(capacity)[None]
        pick = lambda x: x
        if windows:  # nothing outside of the block is drawn, scored or ranked
            at = state.block_start[:, None] + jnp.arange(decoder.block)[None]
            within = jnp.minimum(at, capacity - 1)
            pick = lambda x: jnp.take_along_axis(x, jnp.expand_dims(within, range(2, x.ndim)), 1)
        if store is not None:
            logits, store, state = cache.look(cached, store, state, within, decoder.refresh)
        else:
            if windows and denoise_at is not None:
                logits = denoise_at(state.tokens, state.length, within)
            else:
                logits = pick(denoise(state.tokens, state.length))
            state = spend(state, ~state.done)
        logits = logits.astype(jnp.float32)
        if grow is not None:
            state, logits = grow(state, logits, rng.fold(step_keys, _GROW))
        logits = _without(logits, (mask_id, *decoder.suppress))
        eligible = pick(_eligible(state, decoder, mask_id)) & (at < capacity)

        def cell_keys(stream: int) -> jax.Array:
            return rng.cell_keys(rng.fold(step_keys, stream), at)

        proposal = categorical.sample(cell_keys(_TOKEN), logits, temperature, top_p, top_k)
        if decoder.crop:
            proposal = jnp.where(state.cropped[:, None], categorical.best(logits), proposal)
        logp = policies.log_chance(logits, proposal)
        if decoder.score == "order":
            score = -pick(rank[:, :capacity])
        elif decoder.score == "policy":
            score = policy(logits, masked_positions(state, mask_id), state.fixed, state.length)
        else:
            law = _without(logits, decoder.late)
            shaped = categorical.shape(law, temperature, top_p, top_k)
            view = policies.View(law, shaped, proposal, cell_keys(_SCORE))
            score = SCORES[decoder.score](view)
        if decoder.remask:
            noise = categorical.gumbel(cell_keys(_PLACE))
            state = remask.step(decoder, state, mask_id, eligible, proposal, logp, noise)
            return state, store
        if decoder.noise:
            score = categorical.perturb(cell_keys(_PLACE), score, decoder.noise)
        late = _is_in(proposal, decoder.late)
        by_score, place = policies.ranks(score, eligible, late)
        passes = jnp.where(eligible & ~late, jnp.exp(logp), -1.0)
        passes = jnp.take_along_axis(passes, by_score, axis=1)
        count = _count(decoder, state, eligible, passes, cell_keys(_COUNT))
        reveal = eligible & (place < count[:, None])

        def put(array: jax.Array, new: jax.Array) -> jax.Array:
            if not windows:
                return jnp.where(reveal, new, array)
            target = jnp.where(reveal, at, capacity)  # capacity is dropped
            write = lambda row, index, new: row.at[index].set(new, mode="drop")
            return jax.vmap(write)(array, target, jnp.broadcast_to(new, target.shape))

        state = state.replace(
            tokens=put(state.tokens, proposal),
            when=put(state.when, state.step[:, None]),
            logp=put(state.logp, logp),
            used=state.used + ~state.done,
            step=state.step + ~state.done,
        )
        return advance(_crop(state, decoder), decoder.block, mask_id), store

    store = cache.empty(cached, start) if decoder.refresh else None
    if reach is None:
        reach = lambda length: length if grow is None else jnp.full_like(length, tokens.shape[1])
    end = start
    for width in (*decoder.buckets, tokens.shape[1]):

        def goes_on(carry: tuple[State, cache.Store | None], width: int = width) -> jax.Array:
            state, _ = carry
            fits = state.done | (reach(state.length) <= width)
            return ~jnp.all(state.done) & jnp.all(fits)

        part, _ = jax.lax.while_loop(goes_on, step, (narrowed(end, width), store))
        end = widened(part, end)
    exists = live(end)
    return Samples(
        tokens=jnp.where(exists, end.tokens, 0),
        lengths=end.length,
        step=jnp.where(exists, end.when, -1),
        logp=jnp.where(exists, end.logp, 0.0),
        calls=end.calls,
        widths=end.widths,
        squares=end.squares,
    )


def _check_parts(decoder: Decoder, order, policy, grow, cached) -> None:
    for name, part in (("order", order), ("policy", policy)):
        if (decoder.score == name) != (part is not None):
            raise ValueError(
                f"a decoder of score {decoder.score!r} with {name}="
                f"{'None' if part is None else '...'}; pass {name} exactly when it is the score"
            )
    if decoder.refresh and cached is None:
        raise ValueError(f"refresh={decoder.refresh} needs a denoiser with a cache; pass `cached`")
    if grow is not None:
        check_growth(decoder)


def check_growth(decoder: Decoder) -> None:
    """Raises ValueError if the rows of a decoder cannot grow."""
    cannot = decoder.rule[0] in (*policies.MAY_REVEAL_NONE, *policies.FIXED_SIZE)
    if cannot or decoder.remask or decoder.refresh:
        raise ValueError(
            f"rows cannot grow with schedule {decoder.schedule!r}, remask={decoder.remask!r} and "
            f"refresh={decoder.refresh}; use linear, dllm, one, threshold(p) or factor(f), no "
            "re-masking and no cache, whose positions move"
        )


def _count(decoder: Decoder, state: State, eligible, passes, keys) -> jax.Array:
    """Positions (B,) to reveal."""
    name, number = decoder.rule
    left = jnp.sum(eligible, axis=1, dtype=jnp.int32)
    width = decoder.block or state.tokens.shape[1]
    budget = policies.Budget(
        left, state.size, state.used, decoder.steps, width, number, passes, eligible, keys
    )
    least = 0 if name in policies.MAY_REVEAL_NONE else 1
    count = jnp.clip(COUNTS[name](budget).astype(jnp.int32), jnp.minimum(left, least), left)
    return jnp.where(state.cropped, left, count)


def _skip_idle(state: State, keys: jax.Array, decoder: Decoder, mask_id: int) -> State:
    """Passes over the steps that would reveal nothing: they need no network call."""
    eligible = _eligible(state, decoder, mask_id)
    at = jnp.zeros_like(state.length)[:, None] + jnp.arange(eligible.shape[1])[None]

    def idle(state: State) -> jax.Array:
        step_keys = jax.vmap(jax.random.fold_in)(keys, state.step)
        cell_keys = rng.cell_keys(rng.fold(step_keys, _COUNT), at)
        return ~state.done & (_count(decoder, state, eligible, None, cell_keys) == 0)

    def passed(carry):
        state, rows = carry
        state = state.replace(used=state.used + rows, step=state.step + rows)
        return state, idle(state)

    return jax.lax.while_loop(lambda c: jnp.any(c[1]), passed, (state, idle(state)))[0]


def _crop(state: State, decoder: Decoder) -> State:
    """Cuts rows off after the first end that they wrote, never before the last given position."""
    if not decoder.crop:
        return state
    at = jnp.arange(state.tokens.shape[1])[None]
    reach = jnp.max(jnp.where(state.fixed, at + 1, 0), axis=1)
    ends = _is_in(state.tokens, decoder.crop) & (state.when >= 0) & (at >= reach[:, None])
    after = jnp.argmax(ends, axis=1).astype(jnp.int32) + 1
    cropped = jnp.any(ends & live(state), axis=1) & (after < state.length)
    return state.replace(
        length=jnp.where(cropped, after, state.length), cropped=state.cropped | cropped
    )


def _eligible(state: State, decoder: Decoder, mask_id: int) -> jax.Array:
    """Positions (B, C) that this step may write."""
    if decoder.remask:
        return ~state.fixed & live(state) & ~state.done[:, None]
    masked = masked_positions(state, mask_id)
    return masked & (in_block(state) | state.cropped[:, None])


def _without(logits: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    return jnp.where(_is_in(jnp.arange(logits.shape[-1]), ids), MASKED, logits) if ids else logits


def _is_in(tokens: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    """Which of `tokens` are among `ids`."""
    return functools.reduce(
        jnp.logical_or, [tokens == i for i in ids], jnp.zeros_like(tokens, bool)
    )
