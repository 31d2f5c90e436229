"""A generation order on the data's own layout: skeleton, pixel grid, table header, text, line."""

import pathlib
import textwrap

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from aodiff.data import DataInfo
from aodiff.figures import plt, save

COLORS = "viridis"
STEP = "step it is written"
LABELLED = 64  # more names than that are not drawn


def natural_steps(order: np.ndarray, info: DataInfo) -> np.ndarray:
    """Returns (L,) int64, the step at which each natural position is written.

    Args:
      order: (L,) the unit written at each step, as the model numbers units.
    """
    return info.natural(np.argsort(order))


def learned_order(path: pathlib.Path, order: np.ndarray, info: DataInfo, row: np.ndarray) -> None:
    """The step at which each unit is written, on the layout that `info` knows.

    Args:
      order: (L,) the unit written at each step.
      row: (L,) one row of ids, as the model sees it; shown where the data are text.
    """
    step = natural_steps(order, info)
    if info.xy is not None:
        figure = skeleton(step, info)
    elif info.grid is not None:
        figure = pixels(step, info)
    elif info.names is not None and len(step) <= LABELLED:
        figure = header(step, info)
    elif info.tokenizer is not None:
        figure = text(step, info.natural(np.asarray(row)), info)
    else:
        figure = line(step, info)
    save(figure, path)


def skeleton(step: np.ndarray, info: DataInfo) -> Figure:
    """The links and places of `info`, every place with its step in it and its name beside it."""
    xy = np.asarray(info.xy, float)
    low, span = xy.min(0), np.ptp(xy, axis=0)
    scale = 8.0 / span.max()  # inches per unit
    apart = np.linalg.norm(xy[:, None] - xy[None], axis=-1)
    nearest = apart[~np.eye(len(xy), dtype=bool)].min() * scale * 72  # points
    size = np.clip(0.9 * nearest, 7, 22)
    wide, high = np.maximum(span * scale, 3.0) + (2.6, 1.2)
    figure, axes = plt.subplots(figsize=(wide, high))
    for i, j in info.edges or ():
        axes.plot(*xy[[i, j]].T, color="0.8", lw=3, zorder=1, solid_capstyle="round")
    image = axes.scatter(*xy.T, c=step, cmap=COLORS, s=size**2, zorder=2, edgecolor="white")
    for i, (x, y) in enumerate(xy):
        color = _ink(step[i], len(step))
        axes.text(x, y, str(step[i]), ha="center", va="center", size=0.5 * size, color=color)
        if info.names is not None and size > 12:
            # Beside the place, outwards, so that the names of both sides stay apart.
            side = 1 if x >= low[0] + span[0] / 2 - 1e-6 else -1
            axes.annotate(
                info.names[i],
                (x, y),
                xytext=(side * (0.6 * size + 2), 0),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
                size=8,
                color="0.3",
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
    axes.set_aspect("equal")
    axes.margins(0.18, 0.06)
    axes.axis("off")
    axes.set_title(f"learned order of the {info.unit}s", size=11)
    figure.colorbar(image, label=STEP, shrink=0.6, pad=0.1)
    return figure


def pixels(step: np.ndarray, info: DataInfo) -> Figure:
    """The grid of `info`, each pixel with its step, and the path through it."""
    rows, columns = info.grid
    figure, axes = plt.subplots(figsize=(1.2 + 0.55 * columns, 0.4 + 0.55 * rows))
    image = axes.imshow(step.reshape(rows, columns), cmap=COLORS)
    y, x = np.divmod(np.argsort(step), columns)
    axes.plot(x, y, color="white", lw=1, alpha=0.35)
    if max(rows, columns) <= 16:
        for i, s in enumerate(step):
            color = _ink(s, len(step))
            axes.text(i % columns, i // columns, s, ha="center", va="center", size=8, color=color)
    axes.axis("off")
    axes.set_title(f"learned order of the {info.unit}s", size=11)
    figure.colorbar(image, label=STEP, shrink=0.85)
    return figure


def header(step: np.ndarray, info: DataInfo) -> Figure:
    """The header of a table, coloured by step, linked to the same columns as they are written."""
    n = len(step)
    figure, axes = plt.subplots(figsize=(7.5, 0.9 + 0.24 * n))
    cmap = mpl.colormaps[COLORS]
    for i, s in enumerate(step):
        color = cmap(s / max(n - 1, 1))
        box = dict(boxstyle="round,pad=0.25", facecolor=color, edgecolor="none")
        ink = _ink(s, n)
        name = textwrap.shorten(info.names[i], 28, placeholder="…")
        axes.plot([0, 0.25, 0.75, 1], [i, i, s, s], color=color, lw=1.5, zorder=1)
        axes.text(0, i, name, ha="right", va="center", size=8, color=ink, bbox=box)
        axes.text(1, s, f"{s}  {name}", ha="left", va="center", size=8, color=ink, bbox=box)
    axes.text(0, -1.1, f"{info.unit}s as they come", ha="right", weight="bold", size=9)
    axes.text(1, -1.1, "as they are written (step)", ha="left", weight="bold", size=9)
    axes.set_xlim(-0.75, 1.8)
    axes.set_ylim(n - 0.4, -1.8)
    axes.axis("off")
    return figure


def text(step: np.ndarray, row: np.ndarray, info: DataInfo) -> Figure:
    """The first 256 tokens of a row of text, each on the colour of the step it is written at.

    Args:
      step, row: (L,) by natural position.
    """
    pieces = [info.tokenizer.decode(np.asarray([token])) for token in row[:256]]
    pieces = [p.replace("$", r"\$") if p.isprintable() else "·" for p in pieces]
    single = max(map(len, pieces)) <= 2
    width, cell, size = (32, 0.34, 11) if single else (16, 0.85, 8)
    n, width = len(pieces), min(len(pieces), width)
    rows = -(-n // width)
    figure, axes = plt.subplots(figsize=(cell * width + 1.6, 0.5 * rows + 1.0))
    padded = np.full(rows * width, np.nan)
    padded[:n] = step[:n]
    image = axes.imshow(
        padded.reshape(rows, width), cmap=COLORS, vmin=0, vmax=len(step) - 1, aspect="auto"
    )
    for i, piece in enumerate(pieces):
        x, y, ink = i % width, i // width, dict(color=_ink(step[i], len(step)), ha="center")
        short = piece if len(piece) <= 10 else f"{piece[:9]}…"
        axes.text(x, y - 0.12, short, va="center", size=size, family="monospace", **ink)
        axes.text(x, y + 0.32, step[i], va="center", size=6, **ink)
    axes.axis("off")
    axes.set_title(f"a row of text on the learned order of its {info.unit}s", size=11)
    figure.colorbar(image, label=STEP, fraction=0.03, pad=0.02)
    return figure


def line(step: np.ndarray, info: DataInfo) -> Figure:
    """The step against the natural position."""
    n = len(step)
    figure, axes = plt.subplots(figsize=(5.4, 4.6))
    axes.plot(np.argsort(step), np.arange(n), color="0.85", lw=1, zorder=1)
    axes.scatter(np.arange(n), step, c=step, cmap=COLORS, s=np.clip(2000 / n, 4, 40), zorder=2)
    axes.invert_yaxis()
    axes.set_xlabel(f"{info.unit}, natural position")
    axes.set_ylabel(STEP)
    axes.grid(alpha=0.3)
    axes.set_title(f"learned order of the {info.unit}s", size=11)
    return figure


def _ink(step: int, num: int) -> str:
    """A colour that is legible on the colour of `step`."""
    return "black" if step > 0.6 * num else "white"
