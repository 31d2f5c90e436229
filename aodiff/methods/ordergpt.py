"""OrderGPT: one run learns a generation order from attention, freezes it and trains on under it.

Training is AO-GPT's; only the orders differ. Between steps, `refresh` probes the decoder with
uniform orders, turns its attention into a reciprocal graph, lays the graph on a line (the spectral
teacher) and fits the OrderMLP (the student) to it. Source: OrderGPT; ordergpt in the README table.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from aodiff import rng
from aodiff.config import ConfigError
from aodiff.core import curriculum, graph, likelihood, spectral
from aodiff.core.evidence import visible_count
from aodiff.core.orders import kendall_tau
from aodiff.data import DataInfo
from aodiff.methods.aogpt import (
    AOGPTMethod,
    build_model,
    native_order,
    order_evaluation,
    order_sampler,
)
from aodiff.methods.base import Batch, Evaluation, Params, Samples
from aodiff.nn.order_policy import STUDENTS, OrderMLP, order_loss, z_score
from aodiff.partitioning import shard

FIRST_COUNT, FREEZE_COUNT = 15, 50  # exposures of the rarest pair before a graph, before the freeze
GATE = 0.97  # Kendall tau of student and teacher below which the teacher's order is used
STABLE_TAU, STABLE_REFRESHES, SPLIT_HALF_TAU = 0.95, 5, 0.9
PROBE_BYTES = 64 << 20  # attention probabilities held at once by a probe
SAMPLERS = ("map", "gumbel")


@flax.struct.dataclass
class OrderState:
    """Everything the order depends on, as arrays, so that a resumed run repeats it bit for bit.

    Steps are -1 until they happen. `halves` of the evidence come from disjoint probe examples.
    """

    excess: Any  # (2 halves, n, n) float32, decayed sums of excess attention [target, source]
    count: Any  # (2 halves, n, n) float32, decayed exposures
    values: Any  # (n, V) float32, how often each unit had each value
    mark: Any  # (2,) float32: step and NLL of the last look for a plateau
    priority: Any  # (n,) float32, what orders are drawn from; larger is earlier
    order: Any  # (n,) int32, the learned order
    teacher: Any  # (n,) float32, oriented priorities of the last teacher
    logits: Any  # (n,) float32, the student's z-scored logits, averaged over refreshes
    student: Any  # OrderMLP parameters
    student_opt: Any  # their optimizer state
    start_step: Any  # () int32, end of P0
    order_step: Any  # () int32, first learned order
    freeze_step: Any  # () int32, the order is constant from here on
    doubts: Any  # () int32, see curriculum.orient
    stable: Any  # () int32, consecutive refreshes with an unchanged student order
    num_parts: Any  # () int32, pieces of the last graph
    history: Any  # (refreshes, n) int32, the order after each refresh
    history_step: Any  # (refreshes,) int32, the step of each refresh, -1 where unused


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderGPTMethod(AOGPTMethod):
    """AO-GPT whose orders are learned; the OrderMLP and its optimizer live in `extra`, apart from
    the decoder's parameters, so neither loss can reach the other's parameters."""

    phases: curriculum.Curriculum
    context_gain: float
    sampler_kind: str
    probe_orders: int
    decay: float
    reciprocal: str
    policy: OrderMLP | None  # None: the teacher's priorities are used as they are
    student_lr: float
    student_steps: int
    seed: int

    @classmethod
    def from_config(cls, config, info: DataInfo) -> "OrderGPTMethod":
        """Raises ConfigError for a bad value of `config.method`, before any device work."""
        m = config.method
        _choose("method.sampler", m.sampler, SAMPLERS)
        _choose("method.reciprocal", m.reciprocal, tuple(graph.RECIPROCAL))
        _choose("method.student", m.student, (*STUDENTS, "teacher"))
        for name in ("refresh_every", "probe_orders"):
            if m[name] < 1:
                raise ConfigError(f"method.{name}={m[name]} is too small; set it to 1 or more")
        if config.model.num_sinks != 1:
            raise ConfigError(
                f"model.num_sinks={config.model.num_sinks} leaves OrderGPT no attention it can "
                "read; use 1"
            )
        if config.train.global_batch % 2:
            raise ConfigError(
                f"train.global_batch={config.train.global_batch} must be even: OrderGPT "
                "compares the orders of two halves of a probe batch"
            )
        try:
            phases = curriculum.Curriculum.of(
                config.train.num_steps, m.warmup, m.shift, m.freeze_from, m.settle
            )
        except ValueError as e:
            raise ConfigError(f"method: {e}") from None
        return cls(
            model=build_model(config, info),
            order="uniform",
            num_steps=config.train.num_steps,
            native=native_order(info),
            refresh_every=m.refresh_every,
            phases=phases,
            context_gain=m.context_gain,
            sampler_kind=m.sampler,
            probe_orders=m.probe_orders,
            decay=m.probe_decay,
            reciprocal=m.reciprocal,
            policy=None if m.student == "teacher" else OrderMLP(m.student, m.student_width),
            student_lr=m.student_lr,
            student_steps=m.student_steps,
            seed=config.seed,
        )

    def init_extra(self) -> OrderState:
        n, vocab = self.seq_len, self.model.cfg.vocab_size
        refreshes = self.phases.shift_end // self.refresh_every + 2
        square, none = jnp.zeros((n, n)), jnp.int32(-1)
        student = {}
        if self.policy:
            student = self.policy.init(rng.stream(self.seed, rng.PROBE), square, square)
        return OrderState(
            excess=jnp.zeros((2, n, n)),
            count=jnp.zeros((2, n, n)),
            values=jnp.zeros((n, vocab)),
            mark=jnp.array([0.0, jnp.inf]),
            priority=jnp.zeros(n),
            order=jnp.arange(n, dtype=jnp.int32),
            teacher=jnp.zeros(n),
            logits=jnp.zeros(n),
            student=student,
            student_opt=self._student_tx().init(student),
            start_step=none,
            order_step=none,
            freeze_step=none,
            doubts=jnp.int32(0),
            stable=jnp.int32(0),
            num_parts=jnp.int32(0),
            history=jnp.full((refreshes, n), -1, jnp.int32),
            history_step=jnp.full(refreshes, -1, jnp.int32),
        )

    # ---- training orders -------------------------------------------------------------------------

    def draw(self, key: jax.Array, batch: Batch, step: jax.Array, extra: OrderState) -> Batch:
        """Adds `order` (B, n): learned with the share of the current phase, else uniform."""
        num = batch["tokens"].shape[0]
        keys = rng.example_keys(key, jnp.arange(num))
        keys = jax.vmap(lambda k: jax.random.split(k, 2))(keys)
        share = self.share(step, extra)
        hard = jnp.broadcast_to(extra.order[None], (num, self.seq_len))
        if self.sampler_kind == "gumbel":
            # Strength 0 is exactly uniform, so the strength alone makes the transition.
            kappa = 8.0 * self.seq_len * jnp.square(share)
            drawn = jax.vmap(curriculum.gumbel_order, (0, None, None))(
                keys[:, 0], extra.priority, kappa
            )
            order = jnp.where(share >= 1.0, hard, drawn)
        else:
            uniform = self.order_of("uniform")(keys[:, 0], step)
            coin = jax.vmap(jax.random.uniform)(keys[:, 1]) < share
            order = jnp.where(coin[:, None], hard, uniform)
        return batch | {"order": order}

    def share(self, step: jax.Array, extra: OrderState) -> jax.Array:
        """Share of learned orders at `step`, 0 while there is none."""
        return jnp.where(extra.order_step >= 0, self.phases.share(step, extra.freeze_step), 0.0)

    # ---- refresh ---------------------------------------------------------------------------------

    def refresh(
        self, params: Params, batch: Batch, key: jax.Array, step: int, extra: OrderState
    ) -> tuple[OrderState, dict[str, float]]:
        """Probes the decoder on `batch` and updates the order; nothing changes after the freeze.

        Args:
          batch: the current global batch, possibly sharded.
          key: the probe stream of this step; uniform orders fold in the row.

        Returns:
          (new state, on the host; scalars to log).

        Source: ordergpt.md sections 6 to 10.
        """
        state: OrderState = jax.device_get(extra)
        if state.freeze_step >= 0:
            return extra, {}
        everywhere = _replicated(batch["tokens"])
        probe = jax.device_get(self._probe(params, batch, key))
        state = state.replace(values=state.values + probe["values"])
        nll = float(probe["nll"].sum() / probe["scored"].sum())
        gain = 1.0 - nll / max(curriculum.marginal_entropy(state.values), 1e-12)
        scalars = {"order/context_gain": gain, "order/any_order_nll": nll}
        if state.start_step < 0:
            state = self._maybe_start(state, step, nll, gain)
        if state.start_step >= 0:
            state, more = self._learn(params, batch, step, state, probe, everywhere)
            scalars |= more
        row = int(np.sum(state.history_step >= 0))
        if row < len(state.history_step):
            state = state.replace(
                history=_set(state.history, row, state.order),
                history_step=_set(state.history_step, row, step),
            )
        return state, scalars

    def _maybe_start(self, state: OrderState, step: int, nll: float, gain: float) -> OrderState:
        """P0 ends once context helps, or stops helping more, or at the latest step."""
        look = step - state.mark[0] >= self.phases.earliest
        # Training starts flat; only after some gain is a flat stretch a plateau.
        plateau = look and nll > 0.99 * state.mark[1] and gain >= 0.1 * self.context_gain
        if look:
            state = state.replace(mark=np.array([step, nll], np.float32))
        early = step >= self.phases.earliest and (gain >= self.context_gain or plateau)
        if early or step >= self.phases.latest:
            state = state.replace(start_step=np.int32(step))
        return state

    def _learn(self, params, batch, step, state: OrderState, probe, everywhere):
        """Teacher, orientation, student, gate, stability, freeze."""
        excess = np.float32(self.decay) * state.excess + probe["excess"]
        count = np.float32(self.decay) * state.count + probe["count"]
        state = state.replace(excess=excess, count=count)
        off = ~np.eye(self.seq_len, dtype=bool)
        rarest = float(count.sum(0)[off].min())
        line = self._teach(excess.sum(0), count.sum(0))
        if line is None or rarest < FIRST_COUNT:
            return state.replace(num_parts=np.int32(0)), {"order/num_parts": 0}

        gap, error = jax.device_get(
            self._direction(params, batch, jax.device_put(line.order.astype(np.int32), everywhere))
        )
        agreement = None
        if state.order_step >= 0:
            agreement = float((line.priority - line.priority.mean()) @ state.teacher)
        # The last refresh has no later one to wait for.
        patience = 1 if step >= self.phases.shift_end else 3
        sign, doubts = curriculum.orient(
            float(gap), float(error), agreement, int(state.doubts), patience
        )
        line = line if sign > 0 else line.reverse()
        teacher = line.priority.astype(np.float32)

        state, logits = self._fit_student(state, probe, teacher, everywhere)
        student_order = _order(logits)
        first = state.order_step < 0
        fidelity = kendall_tau(student_order, _order(teacher))
        unchanged = 0.0 if first else kendall_tau(student_order, _order(state.logits))
        stable = int(state.stable) + 1 if unchanged >= STABLE_TAU else 0
        halves = [self._teach(e, c) for e, c in zip(excess, count, strict=True)]
        reliable = 0.0
        if all(halves):
            reliable = abs(kendall_tau(halves[0].order, halves[1].order))

        chosen = logits if fidelity >= GATE else teacher
        priority = spectral.soft_rank(chosen.astype(np.float64)).astype(np.float32)
        settled = (
            step >= self.phases.freeze_from
            and stable >= STABLE_REFRESHES
            and line.num_parts == 1
            and fidelity >= GATE
            and reliable >= SPLIT_HALF_TAU
            and rarest >= FREEZE_COUNT
        )
        freeze = settled or step >= self.phases.shift_end
        moved = kendall_tau(_order(priority), state.order)
        state = state.replace(
            priority=priority,
            order=_order(priority),
            teacher=teacher,
            logits=logits,
            order_step=np.int32(step) if first else state.order_step,
            freeze_step=np.int32(step if freeze else -1),
            doubts=np.int32(doubts),
            stable=np.int32(stable),
            num_parts=np.int32(line.num_parts),
        )
        return state, {
            "order/num_parts": line.num_parts,
            "order/lambda_2_over_3": line.lambda_2 / max(line.lambda_3, 1e-12),
            "order/min_count": rarest,
            "order/direction_gap": sign * float(gap),
            "order/direction_error": float(error),
            "order/tau_student_teacher": fidelity,
            "order/tau_student_previous": unchanged,
            "order/tau_order_previous": 0.0 if first else moved,
            "order/tau_split_half": reliable,
            "order/frozen": float(freeze),
        }

    def _teach(self, excess: np.ndarray, count: np.ndarray) -> spectral.Seriation | None:
        depends = graph.dependency(excess, count)
        weak = graph.mean_excess(excess, count)
        return spectral.seriate(graph.reciprocal_graph(depends, self.reciprocal), weak)

    def _fit_student(self, state: OrderState, probe, teacher: np.ndarray, everywhere):
        """Inner updates on this probe alone (not the running sums), so that the student sees how
        evidence varies. Returns (state, logits (n,) averaged over refreshes)."""
        if self.policy is None:
            return state, teacher
        depends = graph.dependency(probe["excess"].sum(0), probe["count"].sum(0))
        inputs = (depends, graph.reciprocal_graph(depends, self.reciprocal))
        inputs = [graph.standardise(x).astype(np.float32) for x in inputs]
        args = jax.device_put((state.student, state.student_opt, *inputs, teacher), everywhere)
        student, opt, logits = jax.device_get(self._student_updates(*args))
        if state.order_step >= 0:
            logits = np.float32(0.5) * (state.logits + logits)
        return state.replace(student=student, student_opt=opt), logits

    def _student_tx(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(self.student_lr, b1=0.9, b2=0.99, weight_decay=0.01),
        )

    @functools.partial(jax.jit, static_argnums=0)
    def _student_updates(self, student, opt, depends, graph_, teacher):
        tx = self._student_tx()

        def loss(student):
            return order_loss(self.policy.apply(student, depends, graph_), teacher)

        def update(carry, _):
            student, opt = carry
            updates, opt = tx.update(jax.grad(loss)(student), opt, student)
            return (optax.apply_updates(student, updates), opt), None

        (student, opt), _ = jax.lax.scan(update, (student, opt), length=self.student_steps)
        return student, opt, z_score(self.policy.apply(student, depends, graph_))

    @functools.partial(jax.jit, static_argnums=0)
    def _probe(self, params: Params, batch: Batch, key: jax.Array) -> dict[str, jax.Array]:
        """Evidence of the two halves (even and odd rows) of a batch under uniform orders."""
        tokens, mask = batch["tokens"], batch["loss_mask"]
        num, n = tokens.shape
        keys = rng.example_keys(key, jnp.arange(self.probe_orders * num))
        orders = self.order_of("uniform")(keys, jnp.int32(0)).reshape(-1, num, n)
        groups = _num_groups(num, self.model.cfg.num_heads * n * n * 4)

        def one(group):
            tokens, mask, order = group
            logits, evidence = self.model.apply(params, tokens, order, capture=True)
            nll = likelihood.slot_nll(logits, tokens, order)
            return {
                "excess": jnp.mean(evidence, axis=0),
                "count": visible_count(order),
                "nll": jnp.sum(jnp.where(likelihood.to_slots(mask, order), nll, 0.0)),
                "scored": jnp.sum(mask, dtype=jnp.float32),
            }

        def strided(x):
            return x.reshape(num // groups, groups, n).swapaxes(0, 1)

        def once(order):
            found = jax.lax.map(one, jax.tree.map(strided, (tokens, mask, order)))
            return jax.tree.map(lambda x: x.reshape(groups // 2, 2, *x.shape[1:]).sum(0), found)

        found = jax.tree.map(lambda x: x.sum(0), jax.lax.map(once, orders))
        values = jnp.zeros((n, self.model.cfg.vocab_size))
        found["values"] = values.at[jnp.arange(n)[None], tokens].add(mask.astype(jnp.float32))
        return jax.tree.map(lambda x: shard(x, *[None] * x.ndim), found)

    @functools.partial(jax.jit, static_argnums=0)
    def _direction(self, params: Params, batch: Batch, line: jax.Array):
        """Linear-profile loss of `line` (n,) minus that of its reverse: mean, standard error."""
        tokens = batch["tokens"]

        def profile(line):
            order = jnp.broadcast_to(line[None], tokens.shape)
            logits = self.model.apply(params, tokens, order)
            return curriculum.linear_profile(likelihood.slot_nll(logits, tokens, order))

        forward, backward = jax.lax.map(profile, jnp.stack([line, line[::-1]]))
        gap = forward - backward
        return shard(jnp.mean(gap)), shard(jnp.std(gap) / jnp.sqrt(gap.shape[0]))

    # ---- evaluation and sampling -----------------------------------------------------------------

    def evaluation(self, name: str, num_orders: int) -> Evaluation:
        """As AO-GPT's; "own" is the learned order, one fixed permutation and therefore exact."""
        if name != "own":
            return super().evaluation(name, num_orders)
        return order_evaluation(self.apply, _learned, "the learned order", None, self.native)

    def sampler(self, config, max_given: int) -> Callable[..., Samples]:
        if config.sample.order != "own":
            return super().sampler(config, max_given)
        return order_sampler(self.model, _learned, config, max_given)


def _learned(keys: jax.Array, extra: OrderState) -> jax.Array:
    return jnp.broadcast_to(extra.order[None], (keys.shape[0], extra.order.shape[0]))


def _order(priority: np.ndarray) -> np.ndarray:
    return np.argsort(-priority, kind="stable").astype(np.int32)


def _set(array: np.ndarray, row: int, value) -> np.ndarray:
    array = array.copy()
    array[row] = value
    return array


def _num_groups(num: int, row_bytes: int) -> int:
    """An even number of strided groups, each small enough for `PROBE_BYTES`."""
    groups = 2
    while num % (2 * groups) == 0 and num // groups * row_bytes > PROBE_BYTES:
        groups *= 2
    return groups


def _replicated(x: jax.Array):
    """The sharding that puts a whole array on every device of `x`."""
    if isinstance(x.sharding, NamedSharding):
        return NamedSharding(x.sharding.mesh, PartitionSpec())
    return x.sharding


def _choose(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")
