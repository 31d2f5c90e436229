"""Every random number comes from one seed, a purpose, a step and a row; none is stored."""

import jax

INIT, TRAIN, EVAL, SAMPLE, PROBE = 0, 2, 3, 4, 5


def stream(seed: int | jax.Array, purpose: int, step: int | jax.Array = 0) -> jax.Array:
    """Returns the typed key of one purpose at one step.

    Args:
      seed: the run's seed, a Python int or an integer scalar.
      purpose: one of the constants of this module.
      step: training step; evaluation and sampling leave it at 0 (common random numbers).
    """
    root = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(root, purpose), step)


def example_keys(key: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns one key per example, (B,), by folding in `ids` (B,) int32.

    Training folds in the row of the global batch, evaluation the example's id in its file. A row's
    noise is then the same under every mesh, host count and microbatch split.
    """
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)


def fold(keys: jax.Array, number: int | jax.Array) -> jax.Array:
    """Folds one number into every key of `keys` (B,): the next draw of each example."""
    return jax.vmap(lambda k: jax.random.fold_in(k, number))(keys)


def cell_keys(keys: jax.Array, at: jax.Array) -> jax.Array:
    """(B, w) keys of positions `at` (B, w) int32 of each row, from `keys` (B,): no draw depends on
    how many positions are asked for."""
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, at)
