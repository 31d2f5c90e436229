"""Decoding of masked diffusion models: one jitted loop, decoders as choices of its parts.

A step predicts every masked position, may let the row grow, ranks the eligible positions (the
score), says how many to reveal (the schedule) and reveals those. Rows never touch each other: each
has its own length, block, count of steps and random key. Source: decoding.md sections 2 to 7.
"""

import dataclasses
import re
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from aodiff.core import categorical
from aodiff.sampling import policies
from aodiff.sampling.policies import COUNTS, SCORES
from aodiff.sampling.samples import Samples

# tokens (B, C) int32, length (B,) int32 -> logits (B, C, V) float32; positions at or beyond the
# length must be invisible; ids that may not be emitted are at or below -1e8.
Denoise = Callable[[jax.Array, jax.Array], jax.Array]
# logits (B, C, V), masked (B, C) bool, length (B,) -> scores (B, C), higher is revealed earlier.
Policy = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# state, logits, keys (B,) -> state, logits: may insert masks and then return the logits of the
# longer rows. Counts the calls it makes by `spend`, moves `block_end` with an insertion in the
# block, and leaves rows alone that are `done` or `cropped`.
Grow = Callable[["State", jax.Array, jax.Array], tuple["State", jax.Array]]

_TOKEN, _SCORE, _COUNT, _PLACE, _GROW = range(5)  # streams of a step's key


@flax.struct.dataclass
class State:
    """Partly decoded rows: B rows of C positions, of which the first `length` are live.

    Attributes:
      tokens: (B, C) int32, the mask id where nothing is decided yet, 0 beyond the length.
      length: (B,) int32 live positions.
      fixed: (B, C) bool, given positions, which never change.
      block_start, block_end: (B,) int32, the positions that may be revealed now.
      used: (B,) int32 calls used in the block. size: (B,) int32 masks when the block was begun.
      when: (B, C) int32, the step that revealed a position; -1: none.
      logp: (B, C) float32 log probability of each revealed token.
      step: (B,) int32 steps made. calls: (B,) int32 network calls, those of `Grow` included.
      widths, squares: (B,) float32 sums over the calls of the length and its square.
      cropped: (B,) bool, the row ended early and its next step fills what is masked.
      done: (B,) bool.
    """

    tokens: jax.Array
    length: jax.Array
    fixed: jax.Array
    block_start: jax.Array
    block_end: jax.Array
    used: jax.Array
    size: jax.Array
    when: jax.Array
    logp: jax.Array
    step: jax.Array
    calls: jax.Array
    widths: jax.Array
    squares: jax.Array
    cropped: jax.Array
    done: jax.Array


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
    """

    score: str
    schedule: str
    steps: int
    block: int = 0

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

    def check(self, n: int) -> None:
        """Raises ValueError for choices that do not fit rows of n positions."""
        if self.block < 0 or n % (self.block or n):
            raise ValueError(
                f"sample.block={self.block} does not divide the {n} positions of a row; use a "
                "divisor, or 0 for no blocks"
            )
        most = self.block or n
        limited = self.rule[0] in policies.AT_MOST_ONE_CALL_A_TOKEN
        if self.steps < 1 or (limited and self.steps > most):
            raise ValueError(
                f"{self.steps} calls for a block of {most} positions; use at least one call a "
                "block and at most one a token"
            )

    @property
    def rule(self) -> tuple[str, float]:
        """Name and number of the schedule."""
        match = re.fullmatch(r"(\w+)\(([\d.]+)\)", self.schedule)
        name, number = (match[1], float(match[2])) if match else (self.schedule, 0.0)
        return (name if bool(match) == (name in policies.WITH_NUMBER) else "", number)


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
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Samples:
    """Fills the positions that are not given; a row depends on its own key and tokens only.

    Args:
      denoise: logits of partly masked rows.
      keys: (B,) typed keys.
      tokens: (B, C) int32; entries that are not given are ignored. given: (B, C) bool.
      length: (B,) int32 live positions of each row, None: all. The others stay 0.
      order: (B, C) int32 permutations for the score "order".
      policy: scores of the positions for the score "policy".
      grow: lets rows grow, up to C.
      temperature, top_p: of the tokens, 0 is greedy.

    Returns:
      Samples; `step` is the step of the row that filled a position, `logp` that of the tokens
      before temperature and nucleus.
    """
    rank = None if order is None else jnp.argsort(order, axis=1).astype(jnp.float32)
    start = begin(tokens, given, decoder, mask_id=mask_id, length=length)

    def step(state: State) -> State:
        step_keys = jax.vmap(jax.random.fold_in)(keys, state.step)
        logits = denoise(state.tokens, state.length).astype(jnp.float32)
        state = spend(state, ~state.done)
        if grow is not None:
            state, logits = grow(state, logits, _fold(step_keys, _GROW))
        masked = masked_positions(state, mask_id)
        eligible = masked & _in_block(state)
        proposal = categorical.sample(
            _cell_keys(step_keys, _TOKEN, masked), logits, temperature, top_p
        )
        if decoder.score == "order":
            score = -rank
        elif decoder.score == "policy":
            score = policy(logits, masked, state.length)
        else:
            shaped = categorical.shape(logits, temperature, top_p)
            score_keys = _cell_keys(step_keys, _SCORE, masked)
            score = SCORES[decoder.score](policies.View(logits, shaped, proposal, score_keys))
        logp = policies.log_chance(logits, proposal)
        by_score, place = _ranks(score, eligible)
        count_keys = _cell_keys(step_keys, _COUNT, masked)
        passes = jnp.take_along_axis(jnp.where(eligible, jnp.exp(logp), -1.0), by_score, axis=1)
        count = _count(decoder, state, eligible, passes, count_keys)
        reveal = eligible & (place < count[:, None])
        state = state.replace(
            tokens=jnp.where(reveal, proposal, state.tokens),
            when=jnp.where(reveal, state.step[:, None], state.when),
            logp=jnp.where(reveal, logp, state.logp),
            used=state.used + ~state.done,
            step=state.step + ~state.done,
        )
        return advance(state, decoder, mask_id)

    end = jax.lax.while_loop(lambda s: ~jnp.all(s.done), step, start)
    return Samples(
        jnp.where(_live(end), end.tokens, 0),
        end.length,
        end.when,
        end.logp,
        end.calls,
        end.widths,
        end.squares,
    )


def begin(
    tokens: jax.Array,
    given: jax.Array,
    decoder: Decoder,
    *,
    mask_id: int,
    length: jax.Array | None = None,
) -> State:
    """The state before the first step; arguments as those of `decode`."""
    batch, capacity = tokens.shape
    length = jnp.full(batch, capacity, jnp.int32) if length is None else length.astype(jnp.int32)
    none, nothing = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    live = jnp.arange(capacity)[None] < length[:, None]
    fixed = given & live
    state = State(
        tokens=jnp.where(fixed, tokens, jnp.where(live, mask_id, 0)).astype(jnp.int32),
        length=length,
        fixed=fixed,
        block_start=none,
        block_end=none,
        used=none,
        size=none,
        when=jnp.full((batch, capacity), -1, jnp.int32),
        logp=jnp.zeros((batch, capacity), jnp.float32),
        step=none,
        calls=none,
        widths=jnp.zeros(batch, jnp.float32),
        squares=jnp.zeros(batch, jnp.float32),
        cropped=nothing,
        done=nothing,
    )
    first = jnp.argmax(masked_positions(state, mask_id), axis=1).astype(jnp.int32)
    return advance(state.replace(block_start=first, block_end=first), decoder, mask_id)


def spend(state: State, rows: jax.Array) -> State:
    """Counts one network call at the present length for rows (B,) bool."""
    length = jnp.where(rows, state.length, 0).astype(jnp.float32)
    return state.replace(
        calls=state.calls + rows,
        widths=state.widths + length,
        squares=state.squares + length**2,
    )


def masked_positions(state: State, mask_id: int) -> jax.Array:
    """Live positions (B, C) bool that are not decided yet; a given mask id is decided."""
    return (state.tokens == mask_id) & ~state.fixed & _live(state)


def advance(state: State, decoder: Decoder, mask_id: int) -> State:
    """Moves rows whose block is full on to the next block with a mask, and marks finished rows."""
    masked = masked_positions(state, mask_id)
    full = ~jnp.any(masked & _in_block(state), axis=1) & jnp.any(masked, axis=1)
    width = decoder.block or masked.shape[1]
    ahead = jnp.argmax(masked, axis=1).astype(jnp.int32) - state.block_end
    start = state.block_end + ahead // width * width
    state = state.replace(
        block_start=jnp.where(full, start, state.block_start),
        block_end=jnp.where(full, start + width, state.block_end),
        used=jnp.where(full, 0, state.used),
        done=~jnp.any(masked, axis=1),
    )
    size = jnp.sum(masked & _in_block(state), axis=1, dtype=jnp.int32)
    return state.replace(size=jnp.where(full, size, state.size))


def _count(decoder: Decoder, state: State, eligible, passes, keys) -> jax.Array:
    """Positions (B,) to reveal."""
    name, number = decoder.rule
    left = jnp.sum(eligible, axis=1, dtype=jnp.int32)
    width = decoder.block or eligible.shape[1]
    budget = policies.Budget(
        left, state.size, state.used, decoder.steps, width, number, passes, eligible, keys
    )
    least = 0 if name in policies.MAY_REVEAL_NONE else 1
    return jnp.clip(COUNTS[name](budget).astype(jnp.int32), jnp.minimum(left, least), left)


def _ranks(score: jax.Array, eligible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions by falling score, and the place of each; ties go to the lower position."""
    by_score = jnp.argsort(jnp.where(eligible, -score, jnp.inf), axis=1, stable=True)
    return by_score, jnp.argsort(by_score, axis=1)


def _live(state: State) -> jax.Array:
    return jnp.arange(state.tokens.shape[1])[None] < state.length[:, None]


def _in_block(state: State) -> jax.Array:
    at = jnp.arange(state.tokens.shape[1])[None]
    return (at >= state.block_start[:, None]) & (at < state.block_end[:, None])


def _fold(keys: jax.Array, number: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def _cell_keys(keys: jax.Array, stream: int, like: jax.Array) -> jax.Array:
    """(B, C) keys, one per position, so that no draw depends on the width of the row."""
    at = jnp.arange(like.shape[1])
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(_fold(keys, stream), at)
