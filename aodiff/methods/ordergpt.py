"""OrderGPT: one run learns a generation order from attention, freezes it and trains on under it.

Training is AO-GPT's; only the orders differ. Between steps, `refresh` probes the decoder with
uniform orders, turns its attention into a reciprocal graph, lays the graph on a line (the spectral
teacher) and fits the OrderMLP (the student) to it. Source: OrderGPT; ordergpt in the README table.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from aodiff import rng
from aodiff.config import ConfigError
from aodiff.core import curriculum, graph, likelihood, spectral
from aodiff.core.evidence import visible_count
from aodiff.data import DataInfo
from aodiff.methods import order_state
from aodiff.methods.aogpt import (
    AOGPTMethod,
    build_model,
    native_order,
    order_evaluation,
    order_sampler,
)
from aodiff.methods.base import Batch, Evaluation, Params, Samples
from aodiff.methods.order_state import OrderState
from aodiff.nn.order_policy import STUDENTS, OrderMLP, order_loss, z_score
from aodiff.partitioning import shard

PROBE_BYTES = 64 << 20  # attention probabilities held at once by a probe
SAMPLERS = ("map", "gumbel")


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
        n = self.seq_len
        student = {}
        if self.policy:
            square = jnp.zeros((n, n))
            student = self.policy.init(rng.stream(self.seed, rng.PROBE), square, square)
        refreshes = self.phases.shift_end // self.refresh_every + 2
        opt = self._student_tx().init(student)
        return order_state.fresh(n, self.model.cfg.vocab_size, refreshes, student, opt)

    # ---- training orders -------------------------------------------------------------------------

    def draw(
        self, key: jax.Array, batch: Batch, step: jax.Array, params: Params, extra: OrderState
    ) -> tuple[Batch, OrderState]:
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
        return batch | {"order": order}, extra

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
            state = order_state.maybe_start(state, self.phases, step, nll, gain, self.context_gain)
        if state.start_step >= 0:
            state, more = self._learn(params, batch, step, state, probe, everywhere)
            scalars |= more
        return order_state.record(state, step), scalars

    def _learn(self, params, batch, step, state: OrderState, probe, everywhere):
        """Teacher, direction, student, then the rules of `order_state.follow`."""
        state = order_state.add_evidence(state, probe["excess"], probe["count"], self.decay)
        line = spectral.teach(state.excess.sum(0), state.count.sum(0), self.reciprocal)
        if line is None or state.rarest < order_state.FIRST_COUNT:
            return order_state.without_graph(state, self.phases, step), {"order/num_parts": 0}
        forward = jax.device_put(line.order.astype(np.int32), everywhere)
        gap, error = map(float, jax.device_get(self._direction(params, batch, forward)))
        state, sign = order_state.direction(state, line, gap, error, self.phases, step)
        line = line if sign > 0 else line.reverse()
        halves = [
            spectral.teach(excess, count, self.reciprocal)
            for excess, count in zip(state.excess, state.count, strict=True)
        ]
        state, logits = self._fit_student(
            state, probe, line.priority.astype(np.float32), everywhere
        )
        state, scalars = order_state.follow(state, line, halves, logits, self.phases, step)
        return state, scalars | {"order/direction_gap": sign * gap, "order/direction_error": error}

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
