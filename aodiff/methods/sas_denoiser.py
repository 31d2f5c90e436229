"""The second stage of SAS: a denoiser learns along the trajectories of a frozen policy.

The loss of a state is the bound of SAS with the next choice integrated out (Rao-Blackwell), the
state a uniformly random step of a trajectory under the denoiser as it is now. Rows with random
masks instead are ordinary masked training; all of them random is the control. Source: arXiv
2606.23567; decoding.md 12.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aodiff import rng
from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.methods.base import Batch, LossOutput, Params
from aodiff.methods.guided import Guided, GuidedMethod
from aodiff.nn.reveal_policy import log_policy

SCOPES = ("all", "last_block", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SASDenoiserMethod(GuidedMethod):
    """Hyper-parameters and modules of the second stage; see `aodiff.methods.base.Method`.

    Attributes:
      guided: the denoiser, which learns, and the policy.
      random: share of rows with random masks.
      scope: what learns: "all", "last_block" with what follows it, or "head" with the last norm.
    """

    random: float
    scope: str

    @classmethod
    def from_config(cls, config, info: DataInfo) -> "SASDenoiserMethod":
        """Raises ValueError for a model or a policy that cannot be built."""
        m = config.method
        if m.scope not in SCOPES or not 0 <= m.random <= 1:
            raise ConfigError(
                f"method.scope={m.scope!r}, method.random={m.random}: the scope is one of "
                f"{', '.join(SCOPES)}, the share of random masks a number in [0, 1]"
            )
        if m.scope != "all" and config.optim.weight_decay:
            raise ConfigError(
                f"method.scope={m.scope!r} with optim.weight_decay={config.optim.weight_decay} "
                "would still shrink what does not learn; set optim.weight_decay=0"
            )
        return cls(guided=Guided.from_config(config, info), random=m.random, scope=m.scope)

    def init(self, key: jax.Array) -> Params:
        return self.guided.denoiser.init(key)

    def init_extra(self) -> dict:
        """A fresh policy, to be replaced by that of `checkpoint.init_from`."""
        return {"policy": self.guided.policy.init(rng.stream(0, rng.INIT), self.guided.seq_len)}

    def draw(
        self, key: jax.Array, batch: Batch, step: jax.Array, params: Params, extra: Any
    ) -> tuple[Batch, Any]:
        """Adds `hidden` (B, n) bool, a state of each row, and `weight` (B, n) float32 of its
        losses: the number of steps times the policy, or that of the masked bound."""
        num = batch["tokens"].shape[0]
        keys = rng.example_keys(jax.random.fold_in(key, 2 * num), jnp.arange(num))
        drawn, _ = self.guided.denoiser.draw(key, batch, step, params, {})
        hidden, weight = self.on_trajectory(params, extra["policy"], batch, keys)
        random = (jax.vmap(jax.random.uniform)(rng.fold(keys, 2)) < self.random)[:, None]
        return batch | {
            "hidden": jnp.where(random, drawn["hidden"], hidden),
            "weight": jnp.where(random, drawn["weight"], weight),
        }, extra

    def on_trajectory(
        self, params: Params, policy: Params, batch: Batch, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A uniformly random step of a sampled trajectory of each row: hidden and weight (B, n)."""
        choose = self.guided.choose(policy, batch, sampled=True)

        def law(logits, hidden, keys):
            action, kept = choose(logits, hidden, keys)
            scores = self.guided.policy.scores(policy, kept["features"])
            return action, jnp.exp(log_policy(scores, hidden))

        path = self.guided.follow(params, law, batch, rng.fold(keys, 0))
        number = jnp.sum(batch["loss_mask"], axis=1)
        step = (jax.vmap(jax.random.uniform)(rng.fold(keys, 1)) * number).astype(jnp.int32)
        pick = lambda x: jnp.take_along_axis(x, step[None, :, None], axis=0)[0]
        hidden = pick(path.hidden)
        return hidden, jnp.where(hidden, number[:, None] * pick(path.kept), 0.0)

    def loss_fn(self, params: Params, batch: Batch) -> LossOutput:
        """Nats per hidden position of the rows: their bound in the orders of the policy."""
        return self.guided.denoiser.loss_fn(_freeze(params, self.scope), batch)

    @staticmethod
    def split(params: Params, extra: Any) -> tuple[Params, Params]:
        return params, extra["policy"]


def _freeze(params: Params, scope: str) -> Params:
    """`params` of which no gradient reaches what is outside the scope."""
    if scope == "all":
        return params
    stop = jax.lax.stop_gradient

    def one(path, x: jax.Array) -> jax.Array:
        names = [getattr(k, "key", "") for k in path]
        if "norm" in names or "head_kernel" in names:
            return x
        if scope == "last_block" and "blocks" in names:
            return jnp.concatenate([stop(x[:-1]), x[-1:]])
        return stop(x)

    return jax.tree_util.tree_map_with_path(one, params)
