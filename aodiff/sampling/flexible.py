"""Sampling of models that insert: one jitted loop, in which rows grow from an anchor or a template.

A step makes one prediction, reveals some of the masks there are and inserts new ones, which are
not revealed in the step that made them. After the last insertion a few calls drain what is masked.
Rows never touch each other. Source: Kim et al. (FlexMDM), arXiv 2509.01025; flexmdm.md sections 7
and 8.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aodiff import rng
from aodiff.core import categorical, corruption
from aodiff.core.insertion import first_masked, scatter
from aodiff.core.schedules import Rise
from aodiff.nn.flexmdm import Prediction
from aodiff.sampling import counts as counts_lib
from aodiff.sampling import policies
from aodiff.sampling.samples import Samples
from aodiff.sampling.state import live, masked_positions, spend

# tokens (B, C) int32, length (B,) int32, share that has come (B,) float32, slots (B, K) int32 whose
# logits are wanted -> Prediction; ids that may not be emitted are at or below -1e8.
Predict = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Prediction]

_TOKEN, _SCORE, _COUNT, _INSERT = range(4)  # streams of a step's key


def _hazard(rise: Rise, start: jax.Array, end: jax.Array) -> jax.Array:
    return rise.hazard(start) * (end - start)


def _euler(rise: Rise, start: jax.Array, end: jax.Array) -> jax.Array:
    return jnp.minimum(_hazard(rise, start, end), 1)


# Chance to be revealed, or to come, between two times. "exact" is what the process does; "euler"
# and "tau" are the published steps, "tau" with its loss of what happens twice.
RATES: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "exact": (Rise.step_prob, Rise.step_prob),
    "euler": (_euler, _euler),
    "exponential": (lambda *step: -jnp.expm1(-_hazard(*step)), _euler),
    "tau": (lambda *step: _hazard(*step) * jnp.exp(-_hazard(*step)), _euler),
}
REVEALS = ("binomial", "poisson")


@dataclasses.dataclass(frozen=True)
class Inserter:
    """The choices of a sampler.

    Attributes:
      insertion, unmasking: when tokens come and are revealed; free to choose for a model that sees
        the share that has come. Those that slow down at the end need fewer steps.
      steps: calls in which masks are inserted; times are `grid`, or evenly spaced.
      score: a key of `policies.SCORES`; which masks are revealed first. "random" with "binomial"
        reveals each on its own.
      reveal: law of the number of masks that are revealed, in `REVEALS`.
      count: law of the number that is inserted in a gap, a key of `counts.COUNTS`.
      rate: a key of `RATES`.
      window: (w, most): only the leftmost min(w k, most) masks are eligible where k are revealed;
        () are all.
      drain: calls after the last insertion that share out what is still masked; at least 1.
      stop: a row without masks ends when fewer tokens than this are expected to be missing; 0 is
        never.
      grid: steps + 1 increasing times from 0 to 1; () are even ones.
    """

    insertion: Rise
    unmasking: Rise
    steps: int
    score: str = "random"
    reveal: str = "binomial"
    count: str = "poisson"
    rate: str = "exact"
    window: tuple[float, int] | tuple[()] = ()
    drain: int = 8
    stop: float = 1e-3
    grid: tuple[float, ...] = ()

    def __post_init__(self):
        for name, allowed in (
            ("score", policies.SCORES),
            ("reveal", REVEALS),
            ("count", counts_lib.COUNTS),
            ("rate", RATES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}"
                )
        if self.steps < 1 or self.drain < 1:
            raise ValueError(
                f"{self.steps} steps and {self.drain} calls of draining; use at least 1 of each"
            )
        if self.window and not (len(self.window) == 2 and min(self.window) >= 1):
            raise ValueError(
                f"window {self.window} is not (masks for each that is revealed, most masks); use "
                "() or two numbers of at least 1"
            )
        if not self.stop >= 0:
            raise ValueError(f"stop={self.stop} is not allowed; use 0 (never) or more")
        grid = np.asarray(self.grid)
        if self.grid and not (
            len(grid) == self.steps + 1
            and (grid[0], grid[-1]) == (0, 1)
            and np.all(np.diff(grid) > 0)
        ):
            raise ValueError(
                f"grid has {len(grid)} times; give {self.steps + 1} increasing ones from 0 to 1"
            )

    def tables(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Share that has come, chance to be revealed and chance to come by step, each (steps,)."""
        times = np.asarray(self.grid or np.linspace(0, 1, self.steps + 1), np.float32)
        start, end = jnp.asarray(times[:-1]), jnp.asarray(times[1:])
        reveal, come = RATES[self.rate]
        chances = reveal(self.unmasking, start, end), come(self.insertion, start, end)
        return self.insertion.value(start), *chances


@flax.struct.dataclass
class Growing:
    """Rows that grow: the fields of `state.State` that there are, and

    open: (B, C) bool, slots after which masks may be inserted. born: (B, C) int32, the step that
    inserted a slot; -1: it was given. full: (B,) int32 steps of insertion after which a row was at
    its capacity. step: () int32.
    """

    tokens: jax.Array
    length: jax.Array
    fixed: jax.Array
    open: jax.Array
    when: jax.Array
    born: jax.Array
    logp: jax.Array
    calls: jax.Array
    widths: jax.Array
    squares: jax.Array
    full: jax.Array
    done: jax.Array
    step: jax.Array


def begin(tokens: jax.Array, given: jax.Array, *, mask_id: int, anchor: int) -> Growing:
    """Rows of an anchor and what is given, closed up; open wherever something was left out.

    Args:
      tokens: (B, n) int32; a given mask is one token that is to be revealed.
      given: (B, n) bool; a run of positions that are not given, of any width, is a hole that takes
        any number of tokens.
    """
    batch, n = tokens.shape
    front = lambda x, fill: jnp.concatenate([jnp.full_like(x[:, :1], fill), x], axis=1)
    keep = front(given, True)
    hole_next = jnp.concatenate([~given, jnp.zeros_like(given[:, :1])], axis=1)
    place = jnp.where(keep, jnp.cumsum(keep, axis=1) - 1, n + 1)
    none, zero = jnp.full((batch, n + 1), -1, jnp.int32), jnp.zeros(batch, jnp.int32)
    return Growing(
        tokens=scatter(front(tokens, anchor), place, 0),
        length=jnp.sum(keep, axis=1, dtype=jnp.int32),
        fixed=scatter(front(tokens != mask_id, True), place, False),
        open=scatter(hole_next, place, False),
        when=none,
        born=none,
        logp=jnp.zeros((batch, n + 1), jnp.float32),
        calls=zero,
        widths=zero.astype(jnp.float32),
        squares=zero.astype(jnp.float32),
        full=zero,
        done=zero > 0,
        step=jnp.int32(0),
    )


def insert(state: Growing, counts: jax.Array, mask_id: int) -> Growing:
    """Inserts counts (B, C) masks behind each slot; rows must have the room."""
    capacity = state.tokens.shape[1]
    at = jnp.arange(capacity)[None]
    place = jnp.where(live(state), at + jnp.cumsum(counts, axis=1) - counts, capacity)
    length = state.length + jnp.sum(counts, axis=1)
    old = scatter(live(state), place, False)
    exists = corruption.live(length, capacity)
    moved = lambda x, fill: scatter(x, place, fill)
    return state.replace(
        tokens=jnp.where(exists & ~old, mask_id, moved(state.tokens, 0)),
        length=length,
        fixed=moved(state.fixed, False),
        open=moved(state.open, True) & exists,
        when=moved(state.when, -1),
        born=jnp.where(exists & ~old, state.step, moved(state.born, -1)),
        logp=moved(state.logp, 0.0),
    )


def sample(
    predict: Predict,
    keys: jax.Array,
    tokens: jax.Array,
    given: jax.Array,
    inserter: Inserter,
    *,
    mask_id: int,
    anchor: int,
    few: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Samples:
    """Writes rows of any length up to n; a row depends on its own key and template only.

    Args:
      predict: answers to partly written rows of n + 1 slots, the anchor first.
      keys: (B,) typed keys.
      tokens, given: (B, n), see `begin`; given tokens are never changed.
      few: while no row has more masks, logits of that many slots are computed, else of all; it
        changes nothing but the time.
      temperature, top_p, top_k: of the tokens, see `categorical.shape`; temperature 0 is greedy.

    Returns:
      Samples of n positions without the anchor; `step` is the step that revealed a token, `born`
      the one that inserted it.
    """
    steps, total = inserter.steps, inserter.steps + inserter.drain
    alphas, reveal_chance, come_chance = inserter.tables()

    def one(state: Growing) -> Growing:
        inserting, i = state.step < steps, jnp.minimum(state.step, steps - 1)
        alpha = jnp.where(inserting, alphas[i], 1.0)
        step_keys = rng.fold(keys, state.step)
        masked = masked_positions(state, mask_id) & ~state.done[:, None]
        left = jnp.sum(masked, axis=1, dtype=jnp.int32)
        number = _REVEALS[inserter.reveal](rng.fold(step_keys, _COUNT), masked, reveal_chance[i])
        number = jnp.where(inserting, number, -(-left // jnp.maximum(total - state.step, 1)))
        eligible = masked
        if inserter.window:
            width, most = inserter.window
            window = jnp.minimum(jnp.floor(width * number).astype(jnp.int32), int(most))
            window = jnp.where(inserting, window, left)
            eligible = masked & (jnp.cumsum(masked, axis=1) <= window[:, None])
        answer = functools.partial(call, state, alpha, masked, eligible, number, step_keys)
        if few is None or few >= masked.shape[1]:
            revealed, gap, gap_logits = answer(masked.shape[1])
        else:
            wide, narrow = (functools.partial(answer, k) for k in (masked.shape[1], few))
            revealed, gap, gap_logits = jax.lax.cond(jnp.max(left) <= few, narrow, wide)

        open_ = state.open & live(state) & ~state.done[:, None]
        mean = jnp.where(open_, jnp.exp(gap), 0.0)
        gaps = counts_lib.Gaps(
            keys=rng.fold(step_keys, _INSERT),
            mean=mean,
            logits=gap_logits,
            open=open_,
            chance=jnp.where(inserting, come_chance[i], 0.0),
            room=jnp.where(state.done, 0, state.tokens.shape[1] - state.length),
        )
        state = spend(state.replace(**revealed), ~state.done)
        state = insert(state, counts_lib.draw(inserter.count, gaps), mask_id)
        rest = ~jnp.any(masked_positions(state, mask_id), axis=1)
        idle = (jnp.sum(mean, axis=1) < inserter.stop) | (state.step >= steps - 1)
        return state.replace(
            full=state.full + (inserting & ~state.done & (state.length == state.tokens.shape[1])),
            done=state.done | (rest & idle),
            step=state.step + 1,
        )

    def call(state, alpha, masked, eligible, number, step_keys, most: int):
        """The fields of the state that revealing changes, and the model's answer about gaps."""
        slots, _ = first_masked(masked, most)
        out = predict(state.tokens, state.length, jnp.full(len(slots), alpha), slots)
        cells = lambda stream: rng.cell_keys(rng.fold(step_keys, stream), slots)
        logits = out.logits.astype(jnp.float32)
        proposal = categorical.sample(cells(_TOKEN), logits, temperature, top_p, top_k)
        shaped = categorical.shape(logits, temperature, top_p, top_k)
        view = policies.View(logits, shaped, proposal, cells(_SCORE))
        score = policies.SCORES[inserter.score](view)
        among = jnp.take_along_axis(eligible, slots, axis=1)
        _, rank = policies.ranks(score, among, jnp.zeros_like(among))
        place = jnp.where(among & (rank < number[:, None]), slots, masked.shape[1])
        rows = jnp.arange(len(slots))[:, None]
        put = lambda x, new: x.at[rows, place].set(new, mode="drop")
        revealed = dict(
            tokens=put(state.tokens, proposal),
            when=put(state.when, state.step),
            logp=put(state.logp, policies.log_chance(logits, proposal)),
        )
        return revealed, out.gap, out.gap_logits

    start = begin(tokens, given, mask_id=mask_id, anchor=anchor)
    end = jax.lax.while_loop(lambda s: ~jnp.all(s.done), one, start)
    exists = live(end)
    return Samples(
        tokens=jnp.where(exists, end.tokens, 0)[:, 1:],
        lengths=end.length - 1,
        step=jnp.where(exists, end.when, -1)[:, 1:],
        logp=jnp.where(exists, end.logp, 0.0)[:, 1:],
        calls=end.calls,
        widths=end.widths,
        squares=end.squares,
        born=jnp.where(exists, end.born, -1)[:, 1:],
        full=end.full,
    )


def _binomial(keys: jax.Array, masked: jax.Array, chance: jax.Array) -> jax.Array:
    draws = counts_lib.uniform(keys, masked.shape[1])
    return jnp.sum(masked & (draws < chance), axis=1, dtype=jnp.int32)


def _poisson(keys: jax.Array, masked: jax.Array, chance: jax.Array) -> jax.Array:
    left = jnp.sum(masked, axis=1, dtype=jnp.int32)
    return jnp.minimum(jax.vmap(jax.random.poisson)(keys, left * chance), left)


_REVEALS = dict(zip(REVEALS, (_binomial, _poisson), strict=True))


def in_buckets(predict: Predict, widths: tuple[int, ...]) -> Predict:
    """`predict`, which looks at the first slots only while all rows are short.

    Args:
      widths: ascending numbers of slots below those of the rows; the smallest that holds all rows
        is used, or else all slots.
    """

    def fn(tokens: jax.Array, length: jax.Array, alpha: jax.Array, slots: jax.Array) -> Prediction:
        capacity = tokens.shape[1]

        def at(width: int) -> Callable[[], Prediction]:
            def branch() -> Prediction:
                within = jnp.minimum(slots, width - 1)  # masks are; others are not looked at
                out = predict(tokens[:, :width], length, alpha, within)
                pad = lambda x: jnp.pad(
                    x, ((0, 0), (0, capacity - width)) + ((0, 0),) * (x.ndim - 2)
                )
                return out.replace(gap=pad(out.gap), gap_logits=jax.tree.map(pad, out.gap_logits))

            return branch

        which = sum(jnp.int32(jnp.max(length) > width) for width in widths)
        return jax.lax.switch(which, [at(width) for width in (*widths, capacity)])

    return fn if widths else predict
