"""Masked diffusion with insertion: strings of any length, written in any order.

Nothing stands at first but an anchor; masks are inserted, and masks are revealed. Source: Kim et
al. (FlexMDM), arXiv 2509.01025; flexmdm.md sections 2 and 3.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from aodiff import rng
from aodiff.config import ConfigError
from aodiff.core import corruption, insertion
from aodiff.core.schedules import Rise, make_rise
from aodiff.data import DataInfo
from aodiff.methods import mdm_model
from aodiff.methods.base import (
    Batch,
    Evaluation,
    LossOutput,
    Params,
    Samples,
    Scores,
    token_rows,
)
from aodiff.metrics import Mean, Sum
from aodiff.nn.flexmdm import FlexMDM, FlexMDMConfig, Prediction
from aodiff.nn.flexmdm_retrofit import Retrofit, RetrofitConfig
from aodiff.sampling import flexible
from aodiff.sampling.state import check_buckets

LAST_TIME = 1 - 1e-5  # of the bound, whose weights are exact
DECILES = 10
# Choices of `config.sample` that mean nothing here, and their defaults.
FIXED_CANVAS = dict(
    schedule="linear",
    refresh=0,
    position_noise=0.0,
    remask="",
    eos="free",
    crop=False,
    canvas=(),
    grow="none",
)


class Terms(NamedTuple):
    """What a row adds to the loss, each (B,) float32: nats of unmasking and of insertion without
    their hazards, the mean count of missing tokens and the true one, and masks left out."""

    unmasking: jax.Array
    insertion: jax.Array
    mean_count: jax.Array
    count: jax.Array
    overflow: jax.Array


@dataclasses.dataclass(frozen=True)
class FlexMDMMethod:
    """Hyper-parameters and module; see `aodiff.methods.base.Method`.

    Rows of the batch have `seq_len` tokens at most; with the anchor, one slot more. A token that is
    not scored is fixed: it is always there and never masked.

    insertion, unmasking: when tokens come and are revealed in training.
    last_time: times are below it, so that hazards are bounded.
    floor: of what is left, in the hazards that weigh the training loss.
    condition: "alpha": the model sees the share of tokens that have come, and serves any insertion
      schedule; "time": it sees the time at which `insertion` has that share.
    most: masks of a row whose tokens are predicted, at most; more are left out and counted.
    """

    model: FlexMDM | Retrofit
    seq_len: int
    insertion: Rise
    unmasking: Rise
    last_time: float = 0.999
    floor: float = 1e-3
    condition: str = "alpha"
    most: int | None = None
    refresh_every: int = 0
    grows: ClassVar[bool] = True  # a hole in a row may take any number of tokens

    @classmethod
    def from_config(cls, config, info: DataInfo) -> "FlexMDMMethod":
        """Raises ValueError for a model or schedules that cannot be built."""
        m = config.method
        if info.unit_sizes is not None or info.permutation is not None:
            raise ConfigError(
                f"{info.name} has positions of their own vocabulary or a hidden order of positions,"
                " which a row that grows cannot have; use text or symbols in their natural order"
            )
        if not 0 < m.last_time < 1:
            raise ConfigError(f"method.last_time={m.last_time} is not in (0, 1); 0.999 is usual")
        if m.condition not in CONDITIONS:
            raise ConfigError(
                f"method.condition={m.condition!r} is unknown; use one of {', '.join(CONDITIONS)}"
            )
        rises = make_rise(m.insertion), make_rise(m.unmasking)
        return cls(
            build_model(config, info),
            info.seq_len,
            *rises,
            last_time=m.last_time,
            floor=m.floor,
            condition=m.condition,
            most=insertion.most_masked(*rises, info.seq_len),
        )

    def batch_spec(self, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_rows(global_batch, self.seq_len)

    def init(self, key: jax.Array) -> Params:
        one = jnp.ones(1, jnp.int32)
        tokens = jnp.zeros((1, min(8, self.seq_len + 1)), jnp.int32)
        return self.model.init(key, tokens, one, one.astype(jnp.float32))

    def init_extra(self) -> dict:
        return {}

    def draw(
        self, key: jax.Array, batch: Batch, step: jax.Array, params: Params, extra: Any
    ) -> tuple[Batch, Any]:
        """Adds `time` (B,), in strata over the global batch, and `come`, `revealed` (B, n)."""
        num = batch["tokens"].shape[0]
        time = self.last_time * (1 - corruption.strata(key, num))
        keys = rng.example_keys(key, jnp.arange(num))
        return batch | {"time": time} | self.events(keys), extra

    def events(self, keys: jax.Array) -> dict[str, jax.Array]:
        """When each token comes and is revealed, (B, n) float32, for keys (B,)."""
        times = insertion.event_times(keys, self.seq_len, self.insertion, self.unmasking)
        return dict(zip(("come", "revealed"), times, strict=True))

    def loss_fn(self, params: Params, batch: Batch) -> LossOutput:
        """Weighted nats per slot of the batch; `bound` is the bound's, per scored token."""
        time, terms = batch["time"], self.terms(params, batch)
        rates = [r.hazard(time, self.floor) for r in (self.unmasking, self.insertion)]
        nats = rates[0] * terms.unmasking, rates[1] * terms.insertion
        total = jnp.sum(nats[0] + nats[1], dtype=jnp.float32)
        tokens = jnp.sum(batch["loss_mask"], dtype=jnp.float32)
        metrics = {
            "unmask": Mean(jnp.sum(nats[0]), tokens),
            "insert": Mean(jnp.sum(nats[1]), tokens),
            "bound": Mean(total - tokens, tokens),
            "gap_calibration": Mean(jnp.sum(terms.mean_count), jnp.sum(terms.count)),
            "mask_overflow": Sum(jnp.sum(terms.overflow)),
        }
        return LossOutput(Mean(total, jnp.float32(batch["tokens"].size)), metrics)

    def terms(self, params: Params, batch: Batch, train: bool = True) -> Terms:
        """Losses of the rows at `time`, without hazards.

        The counts of a head of classes learn by cross entropy; the bound is of their mean.
        """
        cfg, time = self.model.cfg, batch["time"]
        tokens = after_anchor(batch["tokens"], cfg.anchor)
        fixed = after_anchor(~batch["loss_mask"], True)
        events = (after_anchor(batch[name], 0.0) for name in ("come", "revealed"))
        state = insertion.corrupt(tokens, batch["length"] + 1, fixed, *events, time, cfg.mask)
        slots, real = insertion.first_masked(state.masked, self.most or tokens.shape[1])
        alpha = self.insertion.value(time)
        out = self.predict(params, state.tokens, state.length, alpha, slots)
        target = jnp.take_along_axis(state.target, slots, axis=1)
        nll = optax.softmax_cross_entropy_with_integer_labels(out.logits, target)
        if train and out.gap_logits is not None:
            label = jnp.minimum(state.gap, out.gap_logits.shape[-1] - 1)
            gap = optax.softmax_cross_entropy_with_integer_labels(out.gap_logits, label)
        else:
            gap = insertion.rate_loss(out.gap, state.gap)
        total = lambda x, where: jnp.sum(jnp.where(where, x, 0), axis=1, dtype=jnp.float32)
        return Terms(
            unmasking=total(nll, real),
            insertion=total(gap, state.open),
            mean_count=total(jnp.exp(out.gap), state.open),
            count=total(state.gap, state.open),
            overflow=total(1, state.masked) - total(1, real),
        )

    def predict(
        self,
        params: Params,
        tokens: jax.Array,
        length: jax.Array,
        alpha: jax.Array,
        slots: jax.Array | None = None,
    ) -> Prediction:
        """The model's answer to rows of which the share `alpha` (B,) of tokens has come."""
        cond = CONDITIONS[self.condition](alpha, self.insertion)
        return self.model.apply(params, tokens, length, cond, slots)

    def refresh(self, params, batch, key, step, extra):
        return extra, {}

    def evaluations(self, config) -> dict[str, Evaluation]:
        """ "own" and "any" are the bound; there is no other order to score."""
        other = set(config.eval.orders) - {"own", "any"}
        if other:
            raise ConfigError(
                f"eval.orders names {', '.join(sorted(other))}; a model that inserts has one "
                "likelihood, the bound of all its orders: use own"
            )
        return dict.fromkeys(config.eval.orders, self.bound(config.eval.num_orders))

    def bound(self, draws: int) -> Evaluation:
        """flexmdm.md 3.6: a bound on -log of the probability of a string, its length included.

        Times are stratified over the draws of a row, weights are exact. It is conditional on what
        is fixed. Source: the path density of an insertion process, in which the final string tells
        which token each insertion was.
        """

        def fn(params: Params, batch: Batch, key: jax.Array, extra: Any) -> Scores:
            keys = rng.example_keys(key, batch["example_id"])
            first = jax.vmap(jax.random.uniform)(rng.fold(keys, draws))

            def one(draw: jax.Array):
                time = LAST_TIME * jnp.mod(first + draw / draws, 1.0)
                drawn = batch | {"time": time} | self.events(rng.fold(keys, draw))
                terms = self.terms(params, drawn, train=False)
                nats = self.unmasking.hazard(time) * terms.unmasking
                nats += self.insertion.hazard(time) * terms.insertion
                decile = jnp.floor(time * DECILES).astype(jnp.int32)
                add = lambda x: jnp.zeros(DECILES).at[decile].add(x)
                return nats, Mean(add(terms.mean_count), add(terms.count))

            nats, curves = jax.lax.map(one, jnp.arange(draws))
            count = jnp.sum(batch["loss_mask"], axis=1, dtype=jnp.float32)
            calibration = jax.tree.map(lambda c: jnp.sum(c, axis=0), curves)
            return Scores(jnp.mean(nats, axis=0) - count, count, {"gap_calibration": calibration})

        return Evaluation(fn, f"upper bound (ELBO), {draws} times per row, lengths included")

    def sampler(self, config, max_given: int) -> Callable[..., Samples]:
        """As of every method; takes one more argument, bounds of holes (see `flexible.sample`)."""
        s = config.sample
        for key, off in FIXED_CANVAS.items():
            if s[key] != off:
                raise ConfigError(
                    f"sample.{key}={s[key]!r} is for rows of a fixed length; use {off!r} here"
                )
        if s.count == "thin" and not self.model.cfg.classes:
            raise ConfigError(
                'sample.count="thin" needs the law of each count, which only a model trained with '
                'model.classes has; use "poisson"'
            )
        inserter = flexible.Inserter(
            make_rise(s.insertion),
            make_rise(s.unmasking),
            s.steps or self.seq_len,
            score="random" if s.order in ("own", "uniform") else s.order,
            reveal=s.reveal,
            count=s.count,
            rate=s.rate,
            window=tuple(s.window),
            block=s.block,
            drain=s.drain,
            stop=s.stop,
        )
        cfg, buckets = self.model.cfg, tuple(s.buckets)
        check_buckets(buckets, self.seq_len)
        few = insertion.most_masked(inserter.insertion, inserter.unmasking, self.seq_len)

        def fn(params, extra, keys, tokens, given, bounds=None):
            return flexible.sample(
                flexible.in_buckets(functools.partial(self.predict, params), buckets),
                keys,
                tokens,
                given,
                inserter,
                bounds,
                mask_id=cfg.mask,
                anchor=cfg.anchor,
                few=few,
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
            )

        return fn

    @property
    def mask_id(self) -> int:
        return self.model.cfg.mask

    def flops(self, widths: jax.Array, squares: jax.Array) -> jax.Array:
        """Analytic FLOPs of decoding rows with these `Samples.widths` and `Samples.squares`."""
        return self.model.cfg.forward_flops(widths, squares)

    def flops_per_token(self) -> float:
        return self.model.cfg.forward_flops(1, self.seq_len + 1)


# What the model is told when a share of tokens has come, by `method.condition`.
CONDITIONS = {
    "alpha": lambda alpha, rise: alpha,
    "time": lambda alpha, rise: rise.inverse(alpha),
}


def after_anchor(x: jax.Array, anchor: jax.typing.ArrayLike) -> jax.Array:
    """Rows x (B, n) with a slot in front, (B, n + 1)."""
    return jnp.concatenate([jnp.full_like(x[:, :1], anchor), x], axis=1)


def build_model(config, info: DataInfo) -> FlexMDM | Retrofit:
    """The network of `config.model` for the vocabulary and length of the data."""
    m = config.model
    if config.method.name == "flexmdm_retrofit":
        longer = dataclasses.replace(info, seq_len=info.seq_len + 1)
        base = mdm_model.build_model(config, longer).cfg
        if m.anchor_id is None:
            raise ConfigError(
                "model.anchor_id=None names no first token of rows; use an id of the embedding "
                "that is never emitted, such as the one that begins texts"
            )
        return Retrofit(RetrofitConfig(base, m.anchor_id, m.modulators, m.classes))
    return FlexMDM(
        FlexMDMConfig(
            vocab_size=info.vocab_size,
            capacity=info.seq_len + 1,
            num_layers=m.num_layers,
            width=m.width,
            num_heads=m.num_heads,
            cond_dim=m.cond_dim,
            classes=m.classes,
            qk_norm=m.qk_norm,
            tied_head=m.tied_head,
            dtype=m.dtype,
            remat=m.remat,
            attention=m.attention,
            kernel_std=m.kernel_std,
        )
    )
