"""PNG figure of one sample: what was written, what was given, when each position was filled."""

import pathlib

import matplotlib
import numpy as np

from aodiff.data import DataInfo
from aodiff.figures import plt, save

TITLE = "step at which each {} was written; given ones are gray"


def sample(
    path: pathlib.Path, tokens: np.ndarray, step: np.ndarray, values, info: DataInfo
) -> None:
    """Draws one row on the layout of its data: a grid, a pose, named cells, or running text.

    Args:
      tokens, step: (L,) ids and steps in natural order, step -1 where given.
      values: what stands at each position, by name or in order; None shows the ids as text.
    """
    if info.grid is not None:
        figure = _grid(tokens, step, info)
    elif hasattr(info.codec, "positions"):
        figure = _pose(tokens, step, info)
    elif isinstance(values, dict):
        figure = _cells(values, step, info)
    else:
        figure = _text(tokens, step, info)
    save(figure, path)


def _colours(step: np.ndarray) -> matplotlib.cm.ScalarMappable:
    """Colours of steps, gray where given."""
    colours = matplotlib.colormaps["viridis"].with_extremes(under="lightgray")
    return plt.cm.ScalarMappable(plt.Normalize(0, max(1, step.max())), colours)


def _grid(tokens, step, info):
    figure, panels = plt.subplots(1, 2, figsize=(7, 3.2))
    colours = _colours(step)
    panels[0].imshow(tokens.reshape(info.grid), cmap="gray", vmin=0, vmax=info.vocab_size - 1)
    panels[1].imshow(step.reshape(info.grid), cmap=colours.cmap, norm=colours.norm)
    for axes, title in zip(panels, ("sample", "step it was written"), strict=True):
        axes.set_title(title)
        axes.axis("off")
    return figure


def _pose(tokens, step, info):
    """Joints seen from the front, joined by the known links, coloured by step."""
    places = info.codec.positions(tokens[None])[0][:, :2]
    units = len(tokens) // len(places)
    late = step.reshape(len(places), units).max(axis=1)
    figure, axes = plt.subplots(figsize=(5.5, 5))
    for i, j in info.edges or ():
        axes.plot(*places[[i // units, j // units]].T, color="gray", lw=1, zorder=1)
    colours = _colours(step)
    axes.scatter(*places.T, c=colours.to_rgba(late), s=70, edgecolors="black", zorder=2)
    axes.set_aspect("equal")
    axes.set_title(TITLE.format("joint"), size=9)
    figure.colorbar(colours, ax=axes, label="step")
    return figure


def _cells(values, step, info):
    """A line for each named value."""
    figure, axes = plt.subplots(figsize=(6, 0.24 * len(step) + 0.8))
    colours = _colours(step)
    axes.imshow(step[:, None], cmap=colours.cmap, norm=colours.norm, aspect="auto", alpha=0.6)
    for i, value in enumerate(values.values()):
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        axes.text(0, i, text.replace("$", r"\$"), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(step)), [name.replace("$", r"\$") for name in values], size=8)
    axes.set_xticks([])
    axes.set_title(TITLE.format(info.unit), size=9)
    figure.colorbar(colours, ax=axes, label="step", fraction=0.05)
    return figure


def _text(tokens, step, info):
    """Running text (or ids), 64 positions a line."""
    columns = 64
    rows = -(-len(step) // columns)
    figure, axes = plt.subplots(figsize=(10, 0.24 * rows + 0.6))
    padded = np.full(rows * columns, np.nan)
    padded[: len(step)] = step
    colours = _colours(step)
    image = padded.reshape(rows, columns)
    axes.imshow(image, cmap=colours.cmap, norm=colours.norm, aspect="auto", alpha=0.6)
    for i, token in enumerate(tokens):
        text = info.tokenizer.decode(np.asarray([token])) if info.tokenizer else str(token)
        text = text if text.isprintable() else "·"
        axes.text(
            i % columns,
            i // columns,
            text.replace("$", r"\$"),
            ha="center",
            va="center",
            fontsize=8,
            family="monospace",
        )
    axes.axis("off")
    figure.colorbar(colours, ax=axes, label="step", fraction=0.02)
    axes.set_title(TITLE.format(info.unit), size=9)
    return figure
