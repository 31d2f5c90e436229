"""PNG figures of rows being written: what stood in a row at several calls, and lines over calls."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from aodiff.figures import plt, save

SHOTS = 16  # moments that are drawn, at most
MASK = "□"
COLOURS = {"text": "black", "mask": "silver", "new mask": "tab:orange", "new text": "tab:green"}


def moments(step: np.ndarray, born: np.ndarray) -> list[int]:
    """Calls (at most `SHOTS`) after which something had come or was revealed, the last included."""
    events = np.unique(np.concatenate([step, born]))
    events = events[events >= 0]
    picked = np.linspace(0, len(events) - 1, min(SHOTS, len(events))).astype(int)
    return events[picked].tolist()


def shots(pieces: Sequence[str], step: np.ndarray, born: np.ndarray) -> list[list[tuple[str, str]]]:
    """What there is after each of `moments`: (piece, key of `COLOURS`) from left to right.

    Args:
      pieces: what each of n positions says in the end.
      step, born: (n,) calls that revealed and inserted each; -1: before the first.
    """
    found, before = [], -1
    for now in moments(step, born):
        line = []
        for piece, revealed, came in zip(pieces, step.tolist(), born.tolist(), strict=True):
            if revealed <= now:
                line.append((piece, "new text" if revealed > before else "text"))
            elif came <= now:
                line.append((MASK, "new mask" if came > before else "mask"))
        found.append(line)
        before = now
    return found


def trace(
    path: pathlib.Path, pieces: Sequence[str], step: np.ndarray, born: np.ndarray | None
) -> None:
    """Draws a row as it grew, a line a moment; without `born` (n,) all its positions were there."""
    born = np.full(len(step), -1) if born is None else born
    shown = lambda letter: "¶" if letter == "\n" else letter if letter.isprintable() else "·"
    pieces = ["".join(map(shown, piece)) for piece in pieces]
    lines = shots(pieces, step, born)
    columns = max((sum(len(p) for p, _ in line) for line in lines), default=1)
    size = (min(0.085 * max(columns, 40) + 1.2, 14), 0.24 * max(len(lines), 1) + 0.7)
    figure, axes = plt.subplots(figsize=size)
    for y, (now, line) in enumerate(zip(moments(step, born), lines, strict=True)):
        axes.text(-1, y, f"{now + 1}", ha="right", va="center", fontsize=7, color="gray")
        x = 0
        for piece, kind in line:
            style = dict(va="center", fontsize=7, family="monospace", color=COLOURS[kind])
            for letter in piece:
                axes.text(x, y, letter.replace("$", r"\$"), **style)
                x += 1
    axes.set(xlim=(-4, columns + 1), ylim=(max(len(lines), 1) - 0.5, -0.7))
    axes.axis("off")
    axes.set_title(
        "a row after so many calls; just inserted: orange, just revealed: green", fontsize=8
    )
    save(figure, path)


def over_calls(
    path: pathlib.Path, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
) -> None:
    """Lines (calls, value) by name, in a panel for each kind of value."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    for panel, (label, lines) in zip(axes[0], panels.items(), strict=True):
        for name, points in lines.items():
            panel.plot(*np.array(points).T, "o-", ms=4, lw=1, label=name)
        panel.set(xlabel="network calls a row", ylabel=label, xscale="log")
        panel.tick_params(axis="x", which="minor", labelbottom=False)
        panel.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    save(figure, path)
