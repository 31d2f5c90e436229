"""Sampling of models that insert: one jitted loop, in which rows grow from an anchor or a template.

A step makes one prediction, reveals some of the masks there are and inserts new ones, which are
not revealed in the step that made them. After the last insertion a few calls drain what is masked.
Rows never touch each other. Source: Kim et al. (FlexMDM), arXiv 2509.01025; flexmdm.md sections 7
and 8.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from aodiff import rng
from aodiff.core import categorical
from aodiff.core.insertion import first_masked
from aodiff.core.schedules import Rise
from aodiff.nn.flexmdm import Prediction
from aodiff.sampling import counts as counts_lib
from aodiff.sampling import policies
from aodiff.sampling.growing import Growing, begin, holes, insert
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
      block: only masks in the first block of so many positions that has one are eligible; 0: no
        blocks.
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
    block: int = 0
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
        if self.window and not (
            len(self.window) == 2
            and all(isinstance(w, int | float) and w >= 1 for w in self.window)
        ):
            raise ValueError(
                f"window {self.window} is not (masks for each that is revealed, most masks); use "
                "() or two numbers of at least 1"
            )
        for name, least in (("stop", "never"), ("block", "no blocks")):
            if not getattr(self, name) >= 0:
                value = getattr(self, name)
                raise ValueError(f"{name}={value} is not allowed; use 0 ({least}) or more")
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


def sample(
    predict: Predict,
    keys: jax.Array,
    tokens: jax.Array,
    given: jax.Array,
    inserter: Inserter,
    bounds: jax.Array | None = None,
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
      tokens, given, bounds: (B, n) and (B, n, 2), see `begin`; given tokens are never changed.
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
        number = REVEALS[inserter.reveal](rng.fold(step_keys, _COUNT), masked, reveal_chance[i])
        number = jnp.where(inserting, number, -(-left // jnp.maximum(total - state.step, 1)))
        eligible = jnp.where(inserting, among(masked, number, inserter), masked)
        answer = functools.partial(call, state, alpha, masked, eligible, number, step_keys)
        if few is None or few >= masked.shape[1]:
            revealed, gap, gap_logits = answer(masked.shape[1])
        else:
            wide, narrow = (functools.partial(answer, k) for k in (masked.shape[1], few))
            revealed, gap, gap_logits = jax.lax.cond(jnp.max(left) <= few, narrow, wide)

        open_ = state.open & live(state) & ~state.done[:, None]
        bounded = holes(state)
        if bounded is not None:
            open_ &= bounded.left > 0
        mean = jnp.where(open_, jnp.exp(gap), 0.0)
        gaps = counts_lib.Gaps(
            keys=rng.fold(step_keys, _INSERT),
            mean=mean,
            logits=gap_logits,
            open=open_,
            chance=jnp.where(inserting, come_chance[i], 0.0),
            room=jnp.where(state.done, 0, state.tokens.shape[1] - state.length),
            holes=bounded,
            last=state.step == steps - 1,
        )
        state = spend(state.replace(**revealed), ~state.done)
        state = insert(state, counts_lib.draw(inserter.count, gaps), mask_id)
        rest = ~jnp.any(masked_positions(state, mask_id), axis=1)
        idle = (jnp.sum(mean, axis=1) < inserter.stop) | (state.step >= steps - 1)
        if bounded is not None:
            idle &= ~jnp.any(bounded.due > 0, axis=1) | (state.step >= steps - 1)
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

    start = begin(tokens, given, bounds, mask_id=mask_id, anchor=anchor)
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


def among(masked: jax.Array, number: jax.Array, inserter: Inserter) -> jax.Array:
    """Masks (B, C) bool of which `number` (B,) may be revealed, those of the block and window.

    A block counts positions, a window counts masks (flexmdm.md 7.2).
    """
    if inserter.block:
        block = (jnp.arange(masked.shape[1]) - 1) // inserter.block  # the anchor is in none
        masked &= block[None] == block[jnp.argmax(masked, axis=1)][:, None]
    if inserter.window:
        width, most = inserter.window
        window = jnp.minimum(jnp.floor(width * number).astype(jnp.int32), int(most))
        masked &= jnp.cumsum(masked, axis=1) <= window[:, None]
    return masked


def _binomial(keys: jax.Array, masked: jax.Array, chance: jax.Array) -> jax.Array:
    draws = counts_lib.uniform(keys, masked.shape[1])
    return jnp.sum(masked & (draws < chance), axis=1, dtype=jnp.int32)


def _poisson(keys: jax.Array, masked: jax.Array, chance: jax.Array) -> jax.Array:
    left = jnp.sum(masked, axis=1, dtype=jnp.int32)
    return jnp.minimum(jax.vmap(jax.random.poisson)(keys, left * chance), left)


REVEALS = {"binomial": _binomial, "poisson": _poisson}


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
