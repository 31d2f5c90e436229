"""SAS: a policy learns in which order a frozen denoiser should fill what is hidden.

`params` are the policy; `extra` holds the denoiser and the trajectories that the policy is learning
from. Every `inner_epochs` steps `draw` follows the policy along new ones, several for each row; the
loss is a clipped surrogate over stored arrays, so neither microbatches nor a mesh can change it.
Source: arXiv 2606.23567; decoding.md 10 and 11.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aodiff import rng
from aodiff.config import ConfigError
from aodiff.core import trajectories
from aodiff.data import DataInfo
from aodiff.methods.base import Batch, LossOutput, Params
from aodiff.methods.guided import Guided, GuidedMethod
from aodiff.metrics import Mean
from aodiff.nn.reveal_policy import log_policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class SASMethod(GuidedMethod):
    """Hyper-parameters and modules of a learned order; see `aodiff.methods.base.Method`.

    Attributes:
      guided: the frozen denoiser and the policy, which learns.
      rows: of the global batch. group: trajectories of each of them.
      inner_epochs: training steps on the same trajectories.
      clip: of the ratio of new to old probabilities. advantage: a key of `ADVANTAGES`.
      kl: weight of the divergence from the policy at the start, in nats per step.
      scratch: entries of `extra` that only training reads.
    """

    rows: int
    group: int
    inner_epochs: int
    clip: float
    advantage: str
    kl: float
    scratch: tuple[str, ...] = ("rollout",)

    @classmethod
    def from_config(cls, config, info: DataInfo) -> "SASMethod":
        """Raises ValueError for a model or a policy that cannot be built."""
        m = config.method
        if m.advantage not in trajectories.ADVANTAGES:
            raise ConfigError(
                f"method.advantage={m.advantage!r} is unknown; use one of "
                f"{', '.join(trajectories.ADVANTAGES)}"
            )
        if m.group < 2 or m.inner_epochs < 1 or not m.clip > 0:
            raise ConfigError(
                f"method.group={m.group}, inner_epochs={m.inner_epochs}, clip={m.clip}: a group "
                "needs 2 trajectories to compare, an iteration 1 epoch, the clip a positive number"
            )
        return cls(
            guided=Guided.from_config(config, info),
            rows=config.train.global_batch,
            group=m.group,
            inner_epochs=m.inner_epochs,
            clip=m.clip,
            advantage=m.advantage,
            kl=m.kl,
        )

    def init(self, key: jax.Array) -> Params:
        return self.guided.policy.init(key, self.seq_len)

    def init_extra(self) -> dict:
        """No trajectories, and an empty denoiser, for that of `checkpoint.init_from`."""
        shapes = jax.eval_shape(self.guided.denoiser.init, rng.stream(0, rng.INIT))
        stored = jax.eval_shape(self._no_rollout)
        names = lambda x: ("batch",) + (None,) * (x.ndim - 1)
        return {
            "denoiser": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            "rollout": {
                name: nn.LogicallyPartitioned(jnp.zeros(x.shape, x.dtype), names(x))
                for name, x in stored.items()
            },
        }

    # ---- training --------------------------------------------------------------------------------

    def draw(
        self, key: jax.Array, batch: Batch, step: jax.Array, params: Params, extra: Any
    ) -> tuple[Batch, Any]:
        """The stored trajectories, new ones at every `inner_epochs`-th step."""
        stored = jax.lax.cond(
            step % self.inner_epochs == 0,
            lambda: self.roll_out(key, batch, params, extra["denoiser"]),
            lambda: extra["rollout"],
        )
        return stored, extra | {"rollout": stored}

    def roll_out(self, key: jax.Array, batch: Batch, params: Params, denoiser: Params) -> Batch:
        """`group` trajectories of the sampled policy for each row, and their advantages.

        Returns:
          features (B, G, T, n, F) bfloat16, hidden (B, G, T, n) bool, action (B, G, T) int32, logv
          and advantage (B, G, T) float32, total (B, G) float32, the log likelihood of the row.
        """
        keys = rng.example_keys(key, jnp.arange(batch["tokens"].shape[0]))
        keys = jax.vmap(lambda k: jax.random.split(k, self.group))(keys)
        copies = jax.tree.map(lambda x: jnp.repeat(x, self.group, axis=0), batch)
        choose = self.guided.choose(params, copies, sampled=True)
        path = self.guided.follow(denoiser, choose, copies, keys.reshape(-1))
        path = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 1).reshape(
                -1, self.group, self.guided.steps, *x.shape[2:]
            ),
            path,
        )
        active = jnp.any(path.hidden, axis=-1)
        advantage = trajectories.ADVANTAGES[self.advantage](path.reward, active)
        kept = {"advantage": advantage, "total": jnp.sum(path.reward, axis=2)}
        return {"hidden": path.hidden, "action": path.action} | path.kept | kept

    def _no_rollout(self) -> Batch:
        spec = {k: jnp.zeros(x.shape, x.dtype) for k, x in self.batch_spec(self.rows).items()}
        params = nn.meta.unbox(self.init(rng.stream(0, rng.INIT)))
        denoiser = nn.meta.unbox(self.guided.denoiser.init(rng.stream(0, rng.INIT)))
        return self.roll_out(rng.stream(0, rng.TRAIN), spec, params, denoiser)

    def loss_fn(self, params: Params, batch: Batch) -> LossOutput:
        """The clipped surrogate of the stored actions, mean over all steps with a choice."""
        hidden, features = batch["hidden"], batch["features"]
        active = jnp.any(hidden, axis=-1)
        logv = log_policy(self.guided.policy.scores(params, features), hidden)
        taken = jnp.take_along_axis(logv, batch["action"][..., None], axis=-1)[..., 0]
        loss, clipped = trajectories.clipped_surrogate(
            taken, batch["logv"], batch["advantage"], self.clip
        )
        chance, start = jnp.exp(logv), log_policy(self.guided.policy.start(features), hidden)
        drift = jnp.sum(chance * (logv - start), axis=-1)
        surest = trajectories.best(
            features[..., 0].reshape(-1, self.seq_len), hidden.reshape(-1, self.seq_len)
        )
        same = batch["action"] == surest.reshape(active.shape)
        scored = jnp.any(active, axis=-1)
        metrics = {
            "log_likelihood": Mean.of(batch["total"], scored),
            # Below a tenth of a nat, no order is worth learning.
            "spread": Mean.of(jnp.std(batch["total"], axis=1), scored[:, 0]),
            "policy_entropy": Mean.of(-jnp.sum(chance * logv, axis=-1), active),
            "clipped": Mean.of(clipped.astype(jnp.float32), active),
            "as_confidence": Mean.of(same.astype(jnp.float32), active),
        }
        return LossOutput(Mean.of(loss + self.kl * drift, active), metrics)

    @staticmethod
    def split(params: Params, extra: Any) -> tuple[Params, Params]:
        return extra["denoiser"], params
