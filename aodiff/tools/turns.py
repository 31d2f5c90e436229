"""Timing several things fairly: one after the other, again and again."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def take_turns(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median (wall seconds, CPU seconds of all threads) of each side, run alternately."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            if turn:  # the first is a warm-up
                times[name].append(spent)
    return {
        name: tuple(statistics.median(column) for column in zip(*found, strict=True))
        for name, found in times.items()
    }
