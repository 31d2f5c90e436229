"""Policies of the toy of `tests.toy_denoiser`, as tables over its states; their exact numbers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from tests.toy_denoiser import MASK, ROWS, N, V, conditionals, joint

STATES = list(itertools.product(range(V + 1), repeat=N))
LOGP = functools.lru_cache(conditionals)


def next_state(state: tuple, i: int, symbol: int) -> tuple:
    return (*state[:i], int(symbol), *state[i + 1 :])


def hidden(state: tuple) -> list[int]:
    return [i for i in range(N) if state[i] == MASK]


def table(rule) -> dict[tuple, np.ndarray]:
    """Probabilities (N,) of positions in each state: a softmax of rule(state) over the hidden."""
    found = {}
    for state in STATES:
        if where := hidden(state):
            weight = np.zeros(N)
            weight[where] = np.exp(np.asarray(rule(state), float)[where])
            found[state] = weight / weight.sum()
    return found


def certain(rule) -> dict[tuple, np.ndarray]:
    """The policy that takes the first of the best positions."""
    found = {}
    for state in STATES:
        if where := hidden(state):
            scores = rule(state)
            found[state] = np.eye(N)[max(where, key=lambda i: (scores[i], -i))]
    return found


def bound(policy: dict, strength: float, x: tuple) -> float:
    """Minus the expected log likelihood of row x in the orders of a policy."""
    logp = LOGP(strength)

    def value(state: tuple) -> float:
        return sum(
            policy[state][i] * (logp[state][i, x[i]] + value(next_state(state, i, x[i])))
            for i in hidden(state)
        )

    return -value((MASK,) * N)


def l_sas(policy: dict, strength: float) -> float:
    return float(
        sum(p * bound(policy, strength, tuple(x)) for p, x in zip(joint(), ROWS, strict=True))
    )


def divergence(policy: dict, strength: float) -> float:
    """KL of the law from that of decoding by a policy, by dynamic programming over states."""
    law = {(MASK,) * N: 1.0}
    for _ in range(N):
        after = {}
        for state, mass in law.items():
            for i, symbol in itertools.product(hidden(state), range(V)):
                chance = policy[state][i] * np.exp(LOGP(strength)[state][i, symbol])
                new = next_state(state, i, symbol)
                after[new] = after.get(new, 0.0) + mass * chance
        law = after
    p = joint()
    return float(p @ (np.log(p) - np.log([law[tuple(x)] for x in ROWS])))


def optimal(strength: float, sign: int = 1) -> dict:
    """The best (or, with sign -1, the worst) deterministic policy, by dynamic programming."""
    weight = {tuple(x): p for x, p in zip(ROWS, joint(), strict=True)}

    @functools.cache
    def gains(state: tuple) -> tuple[float, ...]:
        """What each hidden position is worth, -inf elsewhere."""
        agree = [x for x in weight if all(s in (MASK, v) for s, v in zip(state, x, strict=True))]
        worth = np.full(N, -np.inf)
        for i in hidden(state):
            after = [next_state(state, i, x[i]) for x in agree]
            rest = [max(gains(s)) if hidden(s) else 0.0 for s in after]
            now = [sign * LOGP(strength)[state][i, x[i]] for x in agree]
            worth[i] = np.average(np.add(now, rest), weights=[weight[x] for x in agree])
        return tuple(worth)

    return certain(gains)


RULES = {  # score of each position by the state; the first of equal ones
    "l2r": lambda s: -np.arange(N),
    "r2l": lambda s: np.arange(N),
    "confidence": lambda s: np.exp(LOGP(1.0)[s]).max(axis=1),
}
# KL and L_SAS of decoding.md 10.4, for strength 1.
GOLDEN = {
    "uniform": (0.101302, 3.542255),
    "l2r": (0.457929, 3.438016),
    "r2l": (0.280411, 3.260498),
    "confidence": (0.748191, 3.728278),
    "soft": (0.278541, 3.674256),
    "optimal": (0.207680, 3.187767),
    "worst": (0.938524, 3.918611),
}


def policy(name: str) -> dict:
    """A policy of `GOLDEN` as a table."""
    if name in RULES:
        return certain(RULES[name])
    return {
        "uniform": lambda: table(lambda s: np.zeros(N)),
        "soft": lambda: table(lambda s: 5 * np.exp(LOGP(1.0)[s]).max(axis=1)),
        "optimal": lambda: optimal(1.0),
        "worst": lambda: optimal(1.0, sign=-1),
    }[name]()


class Tabular:
    """What SAS asks of a `RevealPolicy`: one free score for each state and position."""

    def __init__(self, strength: float):
        self.strength = strength

    def init(self, key: jax.Array, length: int) -> dict:
        return {"table": jnp.zeros((len(STATES), length))}

    def features(self, logits, masked, given, live):
        """One-hot (B, n, states): the state whose logits these are."""
        known = jnp.asarray(LOGP(self.strength).reshape(len(STATES), -1), jnp.float32)
        far = jnp.abs(known[None] - logits.reshape(len(logits), 1, -1)).max(-1)
        here = jax.nn.one_hot(jnp.argmin(far, axis=1), len(STATES))
        return jnp.broadcast_to(here[:, None], (*masked.shape, len(STATES)))

    def scores(self, params, features):
        return jnp.einsum("...ns,sn->...n", features, params["table"])

    def start(self, features):
        return jnp.zeros(features.shape[:-1])

    def read(self, params) -> dict:
        return table(dict(zip(STATES, np.asarray(params["table"]), strict=True)).get)
