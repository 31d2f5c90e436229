"""How many tokens each network call reveals, as integers, on the host, once."""

import numpy as np

SCHEDULES = ("linear", "cosine")


def reveal_schedule(n: int, steps: int, kind: str) -> np.ndarray:
    """Number of tokens revealed after each of `steps` calls, computed once on the host.

    After call i of S it is max(floor(n (1 - s(1 - i / S))), previous + 1), with s(t) = t ("linear")
    or s(t) = cos((1 - t) pi / 2) ("cosine", slow at the start).

    Returns:
      (steps,) int32, strictly increasing, its last entry n.

    Raises:
      ValueError: unknown kind, or steps outside 1..n.

    Source: aogpt.md 8.3.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"Unknown schedule {kind!r}; use one of: {', '.join(SCHEDULES)}.")
    if not 1 <= steps <= n:
        raise ValueError(
            f"steps={steps} cannot reveal n={n} tokens, at least one each; use 1 to {n} steps"
        )
    i = np.arange(1, steps + 1)
    if kind == "linear":
        revealed = n * i // steps
    else:
        # The small term keeps values that are integers on paper from being floored below.
        revealed = np.floor(n * (1 - np.cos(i / steps * np.pi / 2)) + 1e-9).astype(int)
    return (np.maximum(np.maximum.accumulate(revealed - i), 0) + i).astype(np.int32)


def reveal_table(n: int, steps: int, kind: str) -> np.ndarray:
    """Schedules of every number of targets, for rows that start with different prompts.

    Returns:
      (n + 1, steps + 1) int32: row t starts at 0, follows `reveal_schedule(t, min(steps, t), kind)`
      and stays at t.
    """
    table = np.zeros((n + 1, steps + 1), np.int32)
    for targets in range(1, n + 1):
        used = min(steps, targets)
        table[targets, 1 : used + 1] = reveal_schedule(targets, used, kind)
        table[targets, used + 1 :] = targets
    return table
