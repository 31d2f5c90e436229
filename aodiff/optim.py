"""AdamW with warm-up and cosine decay, as optax transformations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from aodiff import partitioning

NEVER = 2**31 - 1


def learning_rate(optim, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Linear warm-up to `optim.lr`, then a cosine to `optim.lr_floor` at `optim.decay_steps`.

    The first update uses lr / warmup_steps, never zero; past `decay_steps` (default `num_steps`)
    the rate stays at the floor.
    """
    warmup, decay = optim.warmup_steps, optim.decay_steps or num_steps

    def schedule(count: jax.Array) -> jax.Array:
        rise = jnp.minimum(1.0, (count + 1) / max(warmup, 1))
        progress = jnp.clip((count - warmup) / max(decay - warmup, 1), 0.0, 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return rise * (optim.lr_floor + (optim.lr - optim.lr_floor) * cosine)

    return schedule


def decay_mask(boxed: Any) -> Any:
    """True for tensors of rank >= 2, not counting the axis that stacks the layers.

    Args:
      boxed: parameters, abstract or concrete, with their logical names.
    """

    def decayed(names: tuple[str | None, ...]) -> bool:
        return sum(name != "layers" for name in names) >= 2

    names = partitioning.param_names(boxed)
    return jax.tree.map(decayed, names, is_leaf=lambda n: isinstance(n, tuple))


def make_optimizer(optim, num_steps: int, mask: Any) -> optax.GradientTransformation:
    """AdamW (decoupled decay on `mask`) after clipping by the global norm.

    A non-finite gradient leaves the optimizer state untouched and gives a zero update. The learning
    rate in use is `optax.tree.get(opt_state, "learning_rate")`.

    Args:
      optim: `config.optim`.
      num_steps: length of the run, the default length of the decay.
      mask: tree of bool like the parameters, from `decay_mask`.
    """

    def adamw(learning_rate) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(optim.clip_global_norm),
            optax.scale_by_adam(optim.b1, optim.b2, optim.eps),
            optax.add_decayed_weights(optim.weight_decay, mask),
            optax.scale_by_learning_rate(learning_rate),
        )

    schedule = learning_rate(optim, num_steps)
    tx = optax.inject_hyperparams(adamw)(learning_rate=schedule)
    # The loop stops a run of non-finite gradients; the optimizer itself never gives in to one.
    return optax.apply_if_finite(tx, max_consecutive_errors=NEVER)
