"""Generation orders: `order[b, i]` is the natural position generated at step i, `rank` its inverse.

Every distribution draws one order per key, so an example's order depends on its key alone, never on
the batch it sits in, the number of hosts or the mesh. Source: aogpt orders of arXiv 2506.19935
(mixture, fixed, block) and arXiv 2404.09562 (curricula, fractal).
"""

import json
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# (keys (B,), step) -> order (B, n) int32
OrderFn = Callable[[jax.Array, jax.Array | int], jax.Array]
_OneFn = Callable[[jax.Array, jax.Array | int], jax.Array]  # (key, step) -> order (n,)


def inverse(order: jax.Array) -> jax.Array:
    """Returns `rank`, the inverse permutation along the last axis: rank[..., order[..., i]] = i."""
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def kendall_tau(a: np.ndarray, b: np.ndarray) -> float:
    """Kendall's tau of two orders (n,): 1 for equal orders, -1 for reversed ones."""
    a, b = np.argsort(a), np.argsort(b)
    signs = np.sign(a[:, None] - a[None, :]) * np.sign(b[:, None] - b[None, :])
    return float(signs.sum() / (len(a) * (len(a) - 1)))


def count_conditionals(n: int) -> tuple[int, int]:
    """Univariate conditionals of n units: (order-invariant model, order-dependent model).

    Source: arXiv 2506.19935: n 2^(n-1), and n! sum_{i<n} 1/i!.
    """
    dependent = sum(math.factorial(n) // math.factorial(i) for i in range(n))
    return n * 2 ** (n - 1), dependent


def make_order_fn(spec: str, n: int, num_steps: int) -> OrderFn:
    """Builds the order distribution named by a call-like string such as "mix(0.1)".

    Args:
      spec: a name of `ORDERS` with its arguments in parentheses.
      n: number of units.
      num_steps: length of training, the horizon of the curricula.

    Returns:
      fn(keys (B,), step) -> order (B, n) int32, a permutation in every row.

    Raises:
      ValueError: unknown name, wrong arguments, or a file that holds no permutation of n units.
    """
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", spec.strip())
    name = match.group(1) if match else spec
    if name not in ORDERS:
        raise ValueError(f"Unknown order {spec!r}; use one of: {', '.join(sorted(ORDERS))}.")
    build, types = ORDERS[name]
    args = [a.strip() for a in (match.group(2) or "").split(",") if a.strip()]
    try:
        values = [convert(a) for convert, a in zip(types, args, strict=True)]
    except ValueError:
        wanted = ", ".join(t.__name__ for t in types) or "nothing"
        raise ValueError(f"Order {spec!r} has wrong arguments; {name} takes ({wanted}).") from None
    one = build(n, num_steps, *values)

    def order_fn(keys: jax.Array, step: jax.Array | int = 0) -> jax.Array:
        return jax.vmap(lambda key: one(key, step))(keys).astype(jnp.int32)

    return order_fn


def _constant(order) -> _OneFn:
    order = jnp.asarray(order, jnp.int32)
    return lambda key, step: order


def _uniform(n: int, num_steps: int) -> _OneFn:
    return lambda key, step: jax.random.permutation(key, n)


def _l2r(n: int, num_steps: int) -> _OneFn:
    return _constant(np.arange(n))


def _random_with_probability(n: int, probability: Callable, order=None) -> _OneFn:
    """Uniform with `probability(step)`, else `order` (left to right); one coin per example."""
    order = jnp.arange(n) if order is None else jnp.asarray(order)

    def one(key, step):
        coin, perm = jax.random.split(key)
        random = jax.random.uniform(coin) < probability(step)
        return jnp.where(random, jax.random.permutation(perm, n), order)

    return one


def _unit_interval(what: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{what} takes a probability in [0, 1], got {value}.")
    return value


def _positive(what: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{what} takes an integer of at least 1, got {value}.")
    return value


def _mix(n: int, num_steps: int, fraction: float) -> _OneFn:
    _unit_interval("mix", fraction)
    return _random_with_probability(n, lambda step: 1.0 - fraction)


def _linear_from(n: int, num_steps: int, start: float) -> _OneFn:
    _unit_interval("linear_from", start)
    return _random_with_probability(n, lambda step: start + step / num_steps * (1.0 - start))


def _linear_curriculum(n: int, num_steps: int) -> _OneFn:
    return _linear_from(n, num_steps, 0.0)


def _anneal_to_l2r(n: int, num_steps: int, begin: int, end: int) -> _OneFn:
    if not begin < end:
        raise ValueError(f"anneal_to_l2r(a,b) takes steps with a < b, got a={begin}, b={end}.")
    return _random_with_probability(n, lambda step: jnp.clip((end - step) / (end - begin), 0, 1))


def _fixed(n: int, num_steps: int, seed: int) -> _OneFn:
    return _constant(np.random.default_rng(seed).permutation(n))


def _anneal_to_fixed(n: int, num_steps: int, seed: int, begin: float, end: float) -> _OneFn:
    """Uniform until `begin` of the run, the order of fixed(seed) from `end` on."""
    if not 0 <= begin < end <= 1:
        raise ValueError(
            f"anneal_to_fixed(seed,a,b) takes shares of the run, 0 <= a < b <= 1, got a={begin}, "
            f"b={end}."
        )
    first, last = begin * num_steps, end * num_steps
    probability = lambda step: jnp.clip((last - step) / (last - first), 0, 1)
    return _random_with_probability(n, probability, np.random.default_rng(seed).permutation(n))


def _block_fixed(n: int, num_steps: int, block: int) -> _OneFn:
    if block != 4:
        raise ValueError(f"block_fixed has a pattern for blocks of 4 only, got {block}.")
    order = np.concatenate([start + np.array((0, 2, 3, 1)) for start in range(0, n, 4)])
    return _constant(order[order < n])


def _block_random(n: int, num_steps: int, block: int) -> _OneFn:
    blocks = np.arange(n) // _positive("block_random", block)

    def one(key, step):
        perm = jax.random.permutation(key, n)
        return perm[jnp.argsort(jnp.asarray(blocks)[perm], stable=True)]

    return one


def _pool(n: int, num_steps: int, size: int) -> _OneFn:
    random = [np.random.default_rng(i).permutation(n) for i in range(1, _positive("pool", size))]
    pool = jnp.asarray(np.stack([np.arange(n), *random]), jnp.int32)
    return lambda key, step: pool[jax.random.randint(key, (), 0, size)]


def _fractal(n: int, num_steps: int) -> _OneFn:
    order, spans = [], [(0, n)]
    for low, high in spans:  # breadth first: the list grows while it is read
        if low < high:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle + 1, high)]
    return _constant(order)


def _reverse(n: int, num_steps: int) -> _OneFn:
    return _constant(np.arange(n)[::-1])


def _strided(n: int, num_steps: int, stride: int) -> _OneFn:
    _positive("strided", stride)
    starts = range(min(stride, n))
    return _constant(np.concatenate([np.arange(start, n, stride) for start in starts]))


def _file(n: int, num_steps: int, path: str) -> _OneFn:
    with open(path) as f:
        text = f.read()
    try:
        order = json.loads(text)
    except json.JSONDecodeError:
        order = None
    if not isinstance(order, list) or sorted(map(repr, order)) != sorted(map(repr, range(n))):
        raise ValueError(f"{path} holds no permutation of 0..{n - 1}; write a JSON list of them.")
    return _constant(order)


# name -> (builder(n, num_steps, *arguments), types of the arguments)
ORDERS = {
    "anneal_to_fixed": (_anneal_to_fixed, (int, float, float)),
    "anneal_to_l2r": (_anneal_to_l2r, (int, int)),
    "block_fixed": (_block_fixed, (int,)),
    "block_random": (_block_random, (int,)),
    "file": (_file, (str,)),
    "fixed": (_fixed, (int,)),
    "fractal": (_fractal, ()),
    "l2r": (_l2r, ()),
    "linear_curriculum": (_linear_curriculum, ()),
    "linear_from": (_linear_from, (float,)),
    "mix": (_mix, (float,)),
    "pool": (_pool, (int,)),
    "reverse": (_reverse, ()),
    "strided": (_strided, (int,)),
    "uniform": (_uniform, ()),
}
