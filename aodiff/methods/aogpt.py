"""AO-GPT: an autoregressive decoder trained on a distribution of generation orders.

Left-to-right GPT is order "l2r", sigma-GPT is `model.injection="input"`; two-stream and Decoupled
RoPE are injections of the same decoder. Source: Xue et al., arXiv 2506.19935.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aodiff import rng
from aodiff.core import likelihood
from aodiff.core.orders import OrderFn, make_order_fn
from aodiff.data import DataInfo
from aodiff.methods.base import (
    Batch,
    Evaluation,
    LossOutput,
    Params,
    Samples,
    Scores,
    token_rows,
)
from aodiff.metrics import Mean
from aodiff.nn.aogpt import AOGPT, AOGPTConfig
from aodiff.sampling.anyorder import generate, reveal_schedule

# What config.sample has for masked diffusion, and its value here.
MASKED_DIFFUSION = dict(
    top_k=0,
    block=0,
    refresh=0,
    buckets=(),
    position_noise=0.0,
    remask="",
    eos="free",
    crop=False,
    canvas=(),
    grow="none",
)
# Constant at the last step, which evaluations are of.
FIXED_ORDERS = (
    *("native", "l2r", "reverse", "fractal", "fixed", "anneal_to_fixed"),
    *("block_fixed", "strided", "file"),
)


@dataclasses.dataclass(frozen=True)
class AOGPTMethod:
    """Hyper-parameters and module of one any-order decoder; see `aodiff.methods.base.Method`."""

    model: AOGPT
    order: str  # the training order: "native" or a spec of `aodiff.core.orders`
    num_steps: int
    native: tuple[int, ...]  # units in their natural order, seen through the hidden permutation
    refresh_every: int = 0

    def __post_init__(self):
        self.order_of(self.order)  # raises if it cannot be built

    @classmethod
    def from_config(cls, config, info: DataInfo) -> "AOGPTMethod":
        """Raises ValueError for a model or an order that cannot be built."""
        return cls(
            model=build_model(config, info),
            order=config.method.order,
            num_steps=config.train.num_steps,
            native=native_order(info),
        )

    def order_of(self, spec: str) -> OrderFn:
        """The order distribution of a spec; raises for one that cannot be built."""
        return order_of(spec, self.seq_len, self.num_steps, self.native)

    @property
    def seq_len(self) -> int:
        return self.model.cfg.seq_len

    def batch_spec(self, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_rows(global_batch, self.seq_len)

    def init(self, key: jax.Array) -> Params:
        tokens = jnp.zeros((1, self.seq_len), jnp.int32)
        order = jnp.arange(self.seq_len, dtype=jnp.int32)[None]
        return self.model.init(key, tokens, order)

    def init_extra(self) -> dict:
        """An order from a file is state: the program is that of any other such order."""
        if self.order.split("(")[0] != "file":
            return {}
        return {"order": self.order_of(self.order)(jax.random.split(jax.random.key(0), 1), 0)[0]}

    def own_order(self, keys: jax.Array, step: jax.Array, extra: Any) -> jax.Array:
        """The training order (B, n) int32 of each key."""
        if "order" in extra:
            return jnp.broadcast_to(extra["order"][None], (keys.shape[0], self.seq_len))
        return self.order_of(self.order)(keys, step)

    def draw(
        self, key: jax.Array, batch: Batch, step: jax.Array, params: Params, extra: Any
    ) -> tuple[Batch, Any]:
        """Adds `order` (B, n), a pure function of (key, row of the global batch, step)."""
        rows = jnp.arange(batch["tokens"].shape[0])
        return batch | {"order": self.own_order(rng.example_keys(key, rows), step, extra)}, extra

    def loss_fn(self, params: Params, batch: Batch) -> LossOutput:
        """Token NLL in the drawn order (AO section 2.2), nats."""
        tokens, order = batch["tokens"], batch["order"]
        nll = likelihood.slot_nll(self.apply(params)(tokens, order), tokens, order)
        loss = Mean.of(nll, likelihood.to_slots(batch["loss_mask"], order))
        return LossOutput(loss, {})

    def refresh(self, params, batch, key, step, extra):
        return extra, {}

    def apply(self, params: Params) -> likelihood.Apply:
        return lambda tokens, order: self.model.apply(params, tokens, order)

    def evaluations(self, config) -> dict[str, Evaluation]:
        """One per entry of `config.eval.orders`, plus the ensemble and the order-marginal bound."""
        e = config.eval
        found = {name: self.evaluation(name, e.num_orders) for name in e.orders}
        if e.ensemble:
            found[f"ensemble_{e.ensemble}"] = self.ensemble(e.ensemble, e.ensemble_steps)
        if e.marginal:
            found[f"marginal_{e.marginal}"] = self.marginal(e.marginal)
        return found

    def evaluation(self, name: str, num_orders: int) -> Evaluation:
        """`name` is "any", "own" (the training order) or an order of `aodiff.core.orders`."""
        spec = {"any": "uniform", "own": self.order}.get(name, name)
        return order_evaluation(
            self.apply,
            self._order_at_the_end(name),
            f"order {spec}",
            None if spec.split("(")[0] in FIXED_ORDERS else num_orders,
            self.native,
        )

    def ensemble(self, members: int, num_steps: int) -> Evaluation:
        num_steps = min(num_steps, self.seq_len)
        uniform = self.order_of("uniform")

        def fn(params: Params, batch: Batch, key: jax.Array, extra: Any) -> Scores:
            order_key, member_key = _split(rng.example_keys(key, batch["example_id"]))
            nll, count = likelihood.ensemble_nll(
                self.apply(params),
                batch["tokens"],
                uniform(order_key, jnp.int32(0)),
                member_key,
                batch["loss_mask"],
                members=members,
                num_steps=num_steps,
            )
            return Scores(nll, count, {})

        return Evaluation(
            fn,
            f"upper bound, context-order ensemble of {members}, {num_steps} random steps per row",
        )

    def marginal(self, num_orders: int) -> Evaluation:
        uniform = self.order_of("uniform")

        def fn(params: Params, batch: Batch, key: jax.Array, extra: Any) -> Scores:
            keys = rng.example_keys(key, batch["example_id"])
            mask = batch["loss_mask"]
            orders = jax.lax.map(
                lambda i: uniform(rng.fold(keys, i), jnp.int32(0)), jnp.arange(num_orders)
            )
            nll = likelihood.order_marginal_nll(self.apply(params), batch["tokens"], orders, mask)
            scored = jnp.any(mask, axis=1)  # a padding row has no likelihood
            return Scores(jnp.where(scored, nll, 0.0), jnp.sum(mask, axis=1, dtype=jnp.float32), {})

        return Evaluation(fn, f"upper bound, order-marginal over {num_orders} uniform orders")

    def sampler(self, config, max_given: int) -> Callable[..., Samples]:
        order_of = self._order_at_the_end(config.sample.order)
        return order_sampler(self.model, order_of, config, max_given)

    def _order_at_the_end(self, name: str) -> Callable[[jax.Array, Any], jax.Array]:
        """fn(keys, extra) -> orders of the last step; `name` as in `evaluation`."""
        if name == "own":
            return lambda keys, extra: self.own_order(keys, jnp.int32(self.num_steps), extra)
        order_fn = self.order_of("uniform" if name == "any" else name)
        return lambda keys, extra: order_fn(keys, jnp.int32(self.num_steps))

    def flops_per_token(self) -> float:
        return forward_flops_per_token(self.model.cfg)


def order_of(spec: str, seq_len: int, num_steps: int, native: tuple[int, ...]) -> OrderFn:
    """The order distribution of a spec of `aodiff.core.orders`, or "native"; raises ValueError."""
    if spec == "native":
        order = jnp.array(native, jnp.int32)
        return lambda keys, step: jnp.broadcast_to(order[None], (keys.shape[0], len(order)))
    return make_order_fn(spec, seq_len, num_steps)


def native_order(info: DataInfo) -> tuple[int, ...]:
    """The units in natural order, as the model numbers them."""
    return tuple(info.natural(np.arange(info.seq_len)).tolist())


def build_model(config, info: DataInfo) -> AOGPT:
    """The decoder of `config.model` for the vocabulary and length of the data."""
    m = config.model
    return AOGPT(
        AOGPTConfig(
            vocab_size=info.vocab_size,
            seq_len=info.seq_len,
            num_layers=m.num_layers,
            width=m.width,
            num_heads=m.num_heads,
            cond_dim=m.cond_dim,
            injection=m.injection,
            norm=m.norm,
            qk_norm=m.qk_norm,
            tied_head=m.tied_head,
            num_sinks=m.num_sinks,
            unit_sizes=info.unit_sizes,
            dtype=m.dtype,
            remat=m.remat,
            attention=m.attention,
            kernel_std=m.kernel_std,
        )
    )


def _split(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    pairs = jax.vmap(jax.random.split)(keys)
    return pairs[:, 0], pairs[:, 1]


def order_evaluation(
    apply: Callable[[Params], likelihood.Apply],
    order_of: Callable[[jax.Array, Any], jax.Array],
    name: str,
    num_orders: int | None,
    native: tuple[int, ...],
) -> Evaluation:
    """NLL under the orders `order_of(keys (B,), extra)`, with its curves by step and by distance.

    Args:
      num_orders: orders averaged per row; None states that the order is one fixed permutation and
        the number an exact likelihood.
      native: the units in natural order, in which distance is measured.
    """
    place, repeats = np.argsort(native), num_orders or 1

    def fn(params: Params, batch: Batch, key: jax.Array, extra: Any) -> Scores:
        tokens, mask = batch["tokens"], batch["loss_mask"]
        keys = rng.example_keys(key, batch["example_id"])

        def one(repeat: jax.Array):
            order = order_of(rng.fold(keys, repeat), extra)
            nll = likelihood.slot_nll(apply(params)(tokens, order), tokens, order)
            scored = likelihood.to_slots(mask, order)
            curves = {
                "by_step": likelihood.curve_by_step(nll, scored),
                "by_gap": likelihood.curve_by_gap(nll, jnp.asarray(place)[order], scored),
            }
            return jnp.sum(jnp.where(scored, nll, 0.0), axis=1), curves

        nll, curves = jax.lax.map(one, jnp.arange(repeats))
        curves = jax.tree.map(lambda c: jnp.sum(c, axis=0), curves)
        return Scores(jnp.mean(nll, axis=0), jnp.sum(mask, axis=1, dtype=jnp.float32), curves)

    words = "exact" if num_orders is None else f"upper bound (Jensen), mean of {repeats} orders"
    return Evaluation(fn, f"{words}, {name}")


def order_sampler(
    model: AOGPT, order_of: Callable[[jax.Array, Any], jax.Array], config, max_given: int
) -> Callable[..., Samples]:
    """fn(params, extra, keys, tokens, given): cached decoding in order `order_of(keys, extra)`."""
    s = config.sample
    steps = s.steps or model.cfg.seq_len
    for key, off in MASKED_DIFFUSION.items():
        if s[key] != off:
            raise ValueError(f"sample.{key}={s[key]!r} is for masked diffusion; use {off!r} here")
    reveal_schedule(model.cfg.seq_len, steps, s.schedule)

    def fn(params, extra, keys, tokens, given):
        order_key, token_key = _split(keys)
        return generate(
            model,
            params,
            token_key,
            tokens,
            given,
            order_of(order_key, extra),
            steps=steps,
            schedule=s.schedule,
            temperature=s.temperature,
            top_p=s.top_p,
            max_given=max_given,
        )

    return fn


def forward_flops_per_token(cfg: AOGPTConfig) -> float:
    """2 FLOPs per multiply-add; causal attention reads half of the sequence on average."""
    d, layers = cfg.width, cfg.num_layers
    context = (cfg.seq_len + 1) / 2
    two = cfg.injection == "two_stream"
    block = (22 if two else 12) * d * d + (2 if two else 1) * 2 * d * context
    if cfg.injection == "adaln":
        block += 6 * cfg.cond_dim * d
    return 2.0 * (layers * block + d * cfg.padded_vocab)
