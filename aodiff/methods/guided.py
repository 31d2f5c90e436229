"""A denoiser and a policy of positions that guides it: trajectories, likelihoods and decoding."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aodiff.config import ConfigError, editable
from aodiff.core import corruption, trajectories
from aodiff.core.schedules import make_schedule
from aodiff.core.trajectories import Choose, Trajectory
from aodiff.data import DataInfo
from aodiff.methods.aogpt import native_order
from aodiff.methods.base import Batch, Evaluation, Params, Samples, Scores, token_rows
from aodiff.methods.mdm import MDMMethod
from aodiff.methods.mdm_model import board_groups, build_model, end_of_text
from aodiff.nn.reveal_policy import (
    POLICIES,
    RevealMLP,
    RevealPolicy,
    RevealTransformer,
    log_policy,
)
from aodiff.sampling import denoise

Split = Callable[[Params, Any], tuple[Params, Params]]  # params, extra -> denoiser's, policy's


@dataclasses.dataclass(frozen=True)
class Misled(MDMMethod):
    """A denoiser that is confidently wrong at `cells` while more than 30 % of a row is masked:
    its logits move on by one symbol and are tripled (decoding.md 18.3)."""

    cells: tuple[int, ...] = ()

    def amend(self, logits: jax.Array, tokens: jax.Array, at: jax.Array | None = None) -> jax.Array:
        symbols = self.model.cfg.vocab_size
        wrong = logits.at[..., :symbols].set(3.0 * jnp.roll(logits[..., :symbols], 1, axis=-1))
        early = jnp.sum(tokens == self.model.cfg.mask, axis=1) / self.seq_len > 0.3
        misled = jnp.asarray(np.isin(np.arange(tokens.shape[1]), self.cells))
        misled = misled[None] if at is None else misled[at]
        return jnp.where((early[:, None] & misled)[..., None], wrong, logits)


@dataclasses.dataclass(frozen=True)
class Guided:
    """A denoiser and its policy.

    Attributes:
      steps: the largest number of hidden positions of a row.
    """

    denoiser: MDMMethod
    policy: RevealPolicy
    steps: int

    @classmethod
    def from_config(cls, config, info: DataInfo) -> "Guided":
        """Raises ConfigError or ValueError for modules that cannot be built."""
        return cls(_denoiser(config, info), _policy(config, info), _most_hidden(config))

    @property
    def seq_len(self) -> int:
        return self.denoiser.seq_len

    def choose(self, policy: Params, batch: Batch, sampled: bool) -> Choose:
        """The policy, sampled or at its most likely, for the rows of a batch.

        It keeps `features` (B, n, F) and `logv` (B,), the log probability of its choice.
        """

        live = corruption.live(batch["length"], self.seq_len)

        def choose(logits: jax.Array, hidden: jax.Array, keys: jax.Array):
            features = self.policy.features(logits, hidden, batch["given"], live)
            logv = log_policy(self.policy.scores(policy, features), hidden)
            pick = trajectories.draw if sampled else lambda logv, hidden, keys: best(logv, hidden)
            action = pick(logv, hidden, keys)
            taken = jnp.take_along_axis(logv, action[:, None], axis=1)[:, 0]
            return action, {"features": features, "logv": taken}

        best = trajectories.best
        return choose

    def follow(self, denoiser: Params, choose: Choose, batch: Batch, keys: jax.Array) -> Trajectory:
        """One trajectory of each row of a batch, from all it does not give to all it scores."""
        return self.denoiser.follow(denoiser, choose, batch, keys, self.steps)

    # ---- likelihood ------------------------------------------------------------------------------

    def evaluations(self, config, split: Split) -> dict[str, Evaluation]:
        """By name of `config.eval.orders`, in nats per hidden position.

        "own" is the sampled policy, "greedy" its most likely order; "any" is the denoiser's bound,
        which is that of the uniform policy; other names are those of the denoiser.
        """
        found, num_orders = {}, config.eval.num_orders
        for name in config.eval.orders:
            if name in ("own", "greedy"):
                found[name] = self.likelihood(name == "own", num_orders, split)
            else:
                inner = self.denoiser.evaluation(name, num_orders)
                found[name] = Evaluation(_of_denoiser(inner.fn, split), inner.estimator)
        return found

    def likelihood(self, sampled: bool, num_orders: int, split: Split) -> Evaluation:
        """Likelihood in orders of the policy: drawn from it, or its most likely one."""
        draws = num_orders if sampled else 1

        def fn(params: Params, batch: Batch, key: jax.Array, extra: Any) -> Scores:
            denoiser, policy = split(params, extra)
            choose = self.choose(policy, batch, sampled)
            return self.denoiser.along(denoiser, lambda _: choose, batch, key, self.steps, draws)

        kind = "exact, one position per call, the policy at its most likely"
        if sampled:
            kind = f"upper bound (Jensen), {draws} orders of the sampled policy per row"
        return Evaluation(fn, kind)

    # ---- decoding --------------------------------------------------------------------------------

    def sampler(self, config, max_given: int, split: Split) -> Callable[..., Samples]:
        """Decoding by the policy for `sample.order` "own" (most likely) and "sampled", as the
        denoiser alone decodes otherwise."""
        order, guide = config.sample.order, None
        if order in ("own", "sampled"):
            guide = self._guide
            config = editable(config)
            config.sample.position_noise = float(order == "sampled")
        sampler = self.denoiser.sampler(config, max_given, guide)
        return lambda params, extra, *rows: sampler(*split(params, extra), *rows)

    def _guide(self, policy: Params) -> denoise.Policy:
        def scores(
            logits: jax.Array, masked: jax.Array, given: jax.Array, length: jax.Array
        ) -> jax.Array:
            live = corruption.live(length, masked.shape[1])
            return self.policy.scores(policy, self.policy.features(logits, masked, given, live))

        return scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuidedMethod:
    """What the methods that train a part of a guided denoiser share; `split` finds its two parts
    in parameters and extra."""

    guided: Guided
    refresh_every: int = 0

    @staticmethod
    def split(params: Params, extra: Any) -> tuple[Params, Params]:
        """Parameters of the denoiser and of the policy."""
        raise NotImplementedError

    @property
    def seq_len(self) -> int:
        return self.guided.seq_len

    def batch_spec(self, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_rows(global_batch, self.seq_len)

    def refresh(self, params, batch, key, step, extra):
        return extra, {}

    def evaluations(self, config) -> dict[str, Evaluation]:
        return self.guided.evaluations(config, self.split)

    def sampler(self, config, max_given: int) -> Callable[..., Samples]:
        return self.guided.sampler(config, max_given, self.split)

    def flops(self, widths: jax.Array, squares: jax.Array) -> jax.Array:
        return self.guided.denoiser.flops(widths, squares)

    def flops_per_token(self) -> float:
        return self.guided.denoiser.flops_per_token()


def _of_denoiser(fn, split: Split):
    return lambda params, batch, key, extra: fn(split(params, extra)[0], batch, key, {})


def _denoiser(config, info: DataInfo) -> MDMMethod:
    """The denoiser of `config.model`, misled where the method says so."""
    parts = dict(
        model=build_model(config, info),
        noise="count",
        schedule=make_schedule("linear"),
        min_time=1e-3,
        native=native_order(info),
        eos=end_of_text(info),
    )
    cells = tuple(config.method.mislead)
    if cells and not set(cells) <= set(range(info.seq_len)):
        raise ConfigError(
            f"method.mislead={cells} names cells outside 0 .. {info.seq_len - 1}; correct it"
        )
    return Misled(**parts, cells=cells) if cells else MDMMethod(**parts)


def _policy(config, info: DataInfo) -> RevealPolicy:
    """The policy of `config.method`: features of boards where the data has a grid."""
    m = config.method
    if m.policy not in POLICIES:
        raise ConfigError(
            f"method.policy={m.policy!r} is unknown; use one of {', '.join(POLICIES)}"
        )
    if m.policy == "mlp":
        net = RevealMLP(m.policy_width, info.seq_len if m.policy_cells else 0)
    elif m.policy_cells:
        raise ConfigError("method.policy_cells is for method.policy='mlp'; set it to False")
    else:
        net = RevealTransformer(m.policy_width)
    groups = board_groups(info) if info.grid else ()
    return RevealPolicy(net, info.vocab_size, groups, end_of_text(info), m.prior)


def _most_hidden(config) -> int:
    """Positions of a row that its clues leave open, at most."""
    return config.data.seq_len - (config.data.clues[0] if config.data.clues else 0)
