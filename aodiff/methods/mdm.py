"""Masked diffusion: a bidirectional denoiser, trained to fill any set of hidden positions.

Source: Sahoo et al. (MDLM), arXiv 2406.07524; Shi et al. (MD4), arXiv 2406.04329; Nie et al.
(LLaDA), arXiv 2502.09992; mdm.md section 2.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from aodiff import rng
from aodiff.config import ConfigError
from aodiff.core import corruption, trajectories
from aodiff.core.schedules import Schedule, discrete, make_schedule
from aodiff.core.trajectories import Choose, Trajectory
from aodiff.data import DataInfo
from aodiff.methods.aogpt import FIXED_ORDERS, native_order, order_of
from aodiff.methods.base import (
    Batch,
    Evaluation,
    LossOutput,
    Params,
    Samples,
    Scores,
    token_rows,
)
from aodiff.methods.mdm_model import build_model, decoder_of, end_of_text
from aodiff.metrics import Mean
from aodiff.nn.attention import KVCache
from aodiff.nn.mdm import MDM
from aodiff.nn.mdm_config import forward_flops, forward_flops_per_token
from aodiff.sampling import denoise, policies
from aodiff.sampling.cache import Cached
from aodiff.sampling.growth import make_plan

NOISE = ("count", "time")
WEIGHTS = ("bound", "context", "one")
Guide = Callable[[Any], denoise.Policy]  # extra -> scores of positions


@dataclasses.dataclass(frozen=True)
class MDMMethod:
    """Hyper-parameters and module of a masked diffusion model; see `aodiff.methods.base.Method`.

    noise: "count" hides a uniform number of positions, exactly; "time" hides each position with
    the probability of a random time. Both losses have the bound as their expectation (but for
    times below `min_time`), the first with less variance.
    weight: of the losses of hidden positions: "bound" makes the loss one; "context" is more where
    more is known nearby (CART), and "one" the same everywhere, both of them no bound.
    canvas: (share, shortest): that share of the training rows is cut to a length uniform between
    `shortest` and their own, so that the model knows short rows (LLaDA: 0.01, 1).
    eos: the id that ends a text, where rows are texts in their own order.
    """

    model: MDM
    noise: str
    schedule: Schedule
    min_time: float
    native: tuple[int, ...]
    weight: str = "bound"
    canvas: tuple[float, int] | tuple[()] = ()
    eos: int | None = None
    refresh_every: int = 0

    @classmethod
    def from_config(cls, config, info: DataInfo) -> "MDMMethod":
        """Raises ValueError for a model or a schedule that cannot be built."""
        m = config.method
        for key, allowed in (("noise", NOISE), ("weight", WEIGHTS)):
            if m[key] not in allowed:
                raise ConfigError(
                    f"method.{key}={m[key]!r} is unknown; use one of {', '.join(allowed)}"
                )
        if not 0 < m.min_time < 1:
            raise ConfigError(f"method.min_time={m.min_time} is not in (0, 1); 1e-3 is usual")
        if m.times < 0:
            raise ConfigError(
                f"method.times={m.times} must not be negative; use 0 for continuous time"
            )
        canvas = tuple(m.canvas)
        if canvas and not (len(canvas) == 2 and 0 < canvas[0] <= 1 <= canvas[1] <= info.seq_len):
            raise ConfigError(
                f"method.canvas={canvas} is not (share of rows to cut, shortest length); use () "
                f"or a share in (0, 1] and a length of 1 to {info.seq_len}"
            )
        schedule, min_time = make_schedule(m.schedule), m.min_time
        if m.times:  # the first of them is never near 0
            schedule, min_time = discrete(schedule, m.times), 0.0
        return cls(
            model=build_model(config, info),
            noise=m.noise,
            schedule=schedule,
            min_time=min_time,
            native=native_order(info),
            weight=m.weight,
            canvas=canvas,
            eos=end_of_text(info),
        )

    @property
    def seq_len(self) -> int:
        return self.model.cfg.seq_len

    def batch_spec(self, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_rows(global_batch, self.seq_len)

    def init(self, key: jax.Array) -> Params:
        return self.model.init(key, jnp.zeros((1, self.seq_len), jnp.int32))

    def init_extra(self) -> dict:
        return {}

    def draw(
        self, key: jax.Array, batch: Batch, step: jax.Array, params: Params, extra: Any
    ) -> tuple[Batch, Any]:
        """Adds `hidden` (B, n) bool and `weight` (B, n) float32 of the hidden positions' losses."""
        num, n = batch["tokens"].shape
        if self.canvas:
            points = corruption.strata(jax.random.fold_in(key, num), num)
            length = corruption.cut_lengths(points, batch["length"], *self.canvas)
            kept = {
                name: batch[name] & corruption.live(length, n) for name in ("loss_mask", "given")
            }
            batch = batch | kept | {"length": length}
        scored = batch["loss_mask"]
        points = corruption.strata(key, num)
        keys = rng.example_keys(key, jnp.arange(num))
        if self.noise == "count":
            hidden, weight = _hide_count(keys, points, scored)
        else:
            time = self.min_time + (1 - self.min_time) * points
            hidden = corruption.mask_with_rate(keys, scored, 1 - self.schedule.alpha(time))
            weight = self.schedule.weight(time)
        weight = jnp.broadcast_to(weight[:, None], hidden.shape)
        if self.weight == "context":
            weight = corruption.context_weight((scored | batch["given"]) & ~hidden)
        elif self.weight == "one":
            weight = jnp.ones_like(weight)
        return batch | {"hidden": hidden, "weight": weight}, extra

    def loss_fn(self, params: Params, batch: Batch) -> LossOutput:
        """Nats per scored position; with the weight "bound" its mean bounds the NLL."""
        hidden = batch["hidden"]
        nll = self._hidden_nll(params, batch, hidden)
        total = jnp.sum(nll * batch["weight"], dtype=jnp.float32)
        count = jnp.sum(batch["loss_mask"], dtype=jnp.float32)
        return LossOutput(Mean(total, count), {"masked_nll": Mean.of(nll, hidden)})

    def refresh(self, params, batch, key, step, extra):
        return extra, {}

    def denoise(self, params: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Logits (B, n, V) float32 of partly masked rows (B, n), of which `length` (B,) are live.

        What comes after is padding, which no position sees.
        """
        logits = self.model.apply(params, tokens, _segments(length, tokens.shape[1]))
        return self.amend(logits, tokens)

    def denoise_at(
        self, params: Params, tokens: jax.Array, length: jax.Array, at: jax.Array
    ) -> jax.Array:
        """The logits (B, w, V) of positions at (B, w) alone; else as `denoise`, and cheaper."""
        logits = self.model.apply(params, tokens, _segments(length, tokens.shape[1]), at)
        return self.amend(logits, tokens, at)

    def cached(self, params: Params) -> Cached:
        """The same by a cache, see `aodiff.sampling.cache`."""

        def fill(tokens: jax.Array, length: jax.Array) -> KVCache:
            segments = _segments(length, tokens.shape[1])
            return self.model.apply(params, tokens, segments, method="keep")

        def look(tokens: jax.Array, length: jax.Array, at: jax.Array, cache: KVCache):
            segments = _segments(length, tokens.shape[1])
            apply = functools.partial(self.model.apply, params, method="cached")
            logits, cache = apply(tokens, cache, at, segments)
            return self.amend(logits, tokens, at), cache

        return Cached(fill, look)

    def amend(self, logits: jax.Array, tokens: jax.Array, at: jax.Array | None = None) -> jax.Array:
        """What a denoiser makes of its model's logits (B, n, V), or (B, w, V) of positions `at`."""
        return logits

    def _hidden_nll(self, params: Params, batch: Batch, hidden: jax.Array) -> jax.Array:
        """Cross entropy (B, n) float32 of the hidden positions, 0 elsewhere.

        A position that is neither scored nor given (a missing cell) stays masked and unscored; one
        beyond the row's length is invisible.
        """
        tokens, known = batch["tokens"], batch["loss_mask"] | batch["given"]
        shown = jnp.where(hidden | ~known, self.model.cfg.mask, tokens)
        logits = self.denoise(params, shown, batch["length"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return jnp.where(hidden, nll, 0.0)

    def evaluations(self, config) -> dict[str, Evaluation]:
        e = config.eval
        return {name: self.evaluation(name, e.num_orders) for name in e.orders}

    def evaluation(self, name: str, draws: int) -> Evaluation:
        """ "own" and "any" are the bound; any other name, of an order or of a decoder's score, is
        the NLL in that order."""
        return self.bound(draws) if name in ("own", "any") else self.in_order(name, draws)

    def bound(self, draws: int) -> Evaluation:
        """Monte Carlo of mdm.md 2.6: counts stratified over the draws of a row, exact masks."""

        def fn(params: Params, batch: Batch, key: jax.Array, extra: Any) -> Scores:
            scored, keys = batch["loss_mask"], rng.example_keys(key, batch["example_id"])
            first = jax.vmap(jax.random.uniform)(rng.fold(keys, draws))
            n = scored.shape[1]

            def one(draw: jax.Array):
                points = 1.0 - jnp.mod(first + draw / draws, 1.0)
                hidden, weight = _hide_count(rng.fold(keys, draw), points, scored)
                nll = self._hidden_nll(params, batch, hidden)
                step = jnp.sum(scored & ~hidden, axis=1)  # positions written before this prediction
                curve = Mean(
                    jnp.zeros(n).at[step].add(jnp.sum(nll, axis=1), mode="drop"),
                    jnp.zeros(n).at[step].add(jnp.sum(hidden, axis=1), mode="drop"),
                )
                return jnp.sum(nll, axis=1) * weight, curve

            nll, curves = jax.lax.map(one, jnp.arange(draws))
            curves = {"by_step": jax.tree.map(lambda c: jnp.sum(c, axis=0), curves)}
            return Scores(jnp.mean(nll, axis=0), jnp.sum(scored, axis=1, dtype=jnp.float32), curves)

        return Evaluation(fn, f"upper bound (ELBO), {draws} masks per row")

    def in_order(self, spec: str, draws: int) -> Evaluation:
        """NLL of writing one position per call in an order, or by a decoder's score of the most
        likely tokens: the true law of that decoder, n calls.

        A random order makes it a bound, the mean over `draws` of them.
        """
        by_score = spec in policies.SCORES
        order_fn = None if by_score else order_of(spec, self.seq_len, 0, self.native)
        exact = spec.split("(")[0] in FIXED_ORDERS or (by_score and spec != "random")
        draws = 1 if exact else draws

        def choose(keys: jax.Array) -> Choose:
            return by_decoder(spec) if by_score else in_turn(order_fn(keys, jnp.int32(0)))

        def fn(params: Params, batch: Batch, key: jax.Array, extra: Any) -> Scores:
            return self.along(params, choose, batch, key, self.seq_len, draws)

        kind = "exact" if exact else f"upper bound (Jensen), {draws} orders per row"
        return Evaluation(fn, f"{kind}, one position per call, order {spec}")

    def along(
        self,
        params: Params,
        choose: Callable[[jax.Array], Choose],
        batch: Batch,
        key: jax.Array,
        steps: int,
        draws: int,
    ) -> Scores:
        """NLL along trajectories from all a row does not give to all it scores, mean over `draws`.

        Args:
          choose: of the keys (B,) of a draw.
          steps: at least the number of scored positions of a row.
        """
        row_keys = rng.example_keys(key, batch["example_id"])

        def one(draw: jax.Array):
            keys = rng.fold(row_keys, draw)
            path = self.follow(params, choose(keys), batch, keys, steps)
            return path.reward, jnp.any(path.hidden, axis=2)

        reward, active = jax.lax.map(one, jnp.arange(draws))
        curve = Mean(-jnp.sum(reward, axis=(0, 2)), jnp.sum(active, axis=(0, 2), dtype=jnp.float32))
        count = jnp.sum(batch["loss_mask"], axis=1, dtype=jnp.float32)
        return Scores(-jnp.mean(jnp.sum(reward, axis=1), axis=0), count, {"by_step": curve})

    def follow(
        self, params: Params, choose: Choose, batch: Batch, keys: jax.Array, steps: int
    ) -> Trajectory:
        """One trajectory of each row of a batch, from all it does not give to all it scores."""
        return trajectories.follow(
            lambda shown: self.denoise(params, shown, batch["length"]),
            choose,
            batch["tokens"],
            batch["loss_mask"],
            ~(batch["loss_mask"] | batch["given"]),
            keys,
            steps=steps,
            mask_id=self.model.cfg.mask,
        )

    def sampler(self, config, max_given: int, guide: Guide | None = None) -> Callable[..., Samples]:
        """As of every method; guide(extra) is a policy that replaces `sample.order`."""
        s = config.sample
        n, cfg = self.seq_len, self.model.cfg
        order, name = None, "uniform" if s.order == "own" else s.order
        if guide:
            name = "policy"
        elif name not in denoise.SCORES:
            order, name = order_of(name, n, 0, self.native), "order"
        decoder = decoder_of(s, name, n, self.eos)
        if (s.refresh or s.buckets) and cfg.unit_sizes:
            raise ConfigError(
                f"sample.refresh={s.refresh} and sample.buckets={tuple(s.buckets)} with positions "
                "of their own vocabularies, which are predicted together; use 0 and ()"
            )
        if s.buckets and cfg.position != "rope":
            raise ConfigError(
                f"sample.buckets={tuple(s.buckets)} with model.position={cfg.position!r}, whose "
                'rows have one width; use () or "rope"'
            )
        plan = make_plan(
            tuple(s.canvas),
            n,
            s.grow,
            {"carve": s.carve, "daedal": s.daedal},
            decoder,
            mask_id=cfg.mask,
            end=self.eos,
        )

        def fn(params, extra, keys, tokens, given):
            call = functools.partial(self.denoise, params)
            return denoise.decode(
                call,
                keys,
                tokens,
                given,
                decoder,
                order=order and order(rng.fold(keys, n), jnp.int32(0)),
                policy=guide and guide(extra),
                **plan(call, given),
                denoise_at=None if cfg.unit_sizes else functools.partial(self.denoise_at, params),
                cached=self.cached(params),
                mask_id=cfg.mask,
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
            )

        return fn

    def flops(self, widths: jax.Array, squares: jax.Array) -> jax.Array:
        """Analytic FLOPs of decoding rows with these `Samples.widths` and `Samples.squares`."""
        return forward_flops(self.model.cfg, widths, squares)

    def flops_per_token(self) -> float:
        return forward_flops_per_token(self.model.cfg)


def _segments(length: jax.Array, n: int) -> jax.Array:
    """(B, n) int32, 0 for live positions and -1 for padding."""
    return jnp.where(corruption.live(length, n), 0, -1)


def by_decoder(name: str) -> Choose:
    """The order of a decoder's score, for the most likely tokens."""

    def choose(logits: jax.Array, hidden: jax.Array, keys: jax.Array):
        cells = jax.vmap(lambda k: jax.random.split(k, hidden.shape[1]))(keys)
        proposal = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        score = policies.SCORES[name](policies.View(logits, logits, proposal, cells))
        return trajectories.best(score, hidden), {}

    return choose


def in_turn(order: jax.Array) -> Choose:
    """Given orders of positions (B, n)."""
    rank = jnp.argsort(order, axis=1)
    return lambda logits, hidden, keys: (trajectories.best(-rank, hidden), {})


def _hide_count(keys, points, scored):
    """Hidden positions (B, n) and the weight size / count (B,) of their losses."""
    sizes = jnp.sum(scored, axis=1, dtype=jnp.int32)
    counts = corruption.stratified_counts(points, sizes)
    weight = sizes / jnp.maximum(counts, 1)
    return corruption.mask_count(keys, scored, counts), weight.astype(jnp.float32)
