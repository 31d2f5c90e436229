"""PNG figures of a learned order: where it goes, what it rests on, and how it was found."""

import json
import pathlib

import numpy as np

from aodiff.core import graph
from aodiff.data import DataInfo
from aodiff.data.codecs import Columns
from aodiff.figures import plt, save
from aodiff.methods.ordergpt import OrderState


def write_order(workdir: pathlib.Path, state: OrderState, reciprocal: str, info: DataInfo) -> None:
    """Writes order.json, order.png, dependency.png and order_history.png to `workdir`.

    Args:
      state: the method's state; any arrays.
      reciprocal: `config.method.reciprocal`, the way the graph joins the two directions of a pair.
      info: names the units and holds the permutation that hid them from the model.
    """
    (workdir / "order.json").write_text(json.dumps(np.asarray(state.order).tolist()))
    native = info.natural(np.arange(info.seq_len))  # the units in natural order
    depends = graph.dependency(
        np.asarray(state.excess, np.float64).sum(0), np.asarray(state.count, np.float64).sum(0)
    )
    names = None
    if isinstance(info.codec, Columns):
        # Columns come in natural order; units are numbered by the hidden permutation.
        names = np.array(info.codec.names)[np.argsort(native)]
    order = np.asarray(state.order)
    learned_order(workdir / "order.png", order, native, info, names)
    dependency(workdir / "dependency.png", depends, order, native, reciprocal, names)
    known = np.asarray(state.history_step) >= 0
    order_history(
        workdir / "order_history.png",
        np.asarray(state.history)[known],
        np.asarray(state.history_step)[known],
        native,
        int(state.order_step),
        int(state.freeze_step),
    )


def learned_order(
    path: pathlib.Path,
    order: np.ndarray,
    native: np.ndarray,
    info: DataInfo,
    names: np.ndarray | None,
) -> None:
    """The step at which each unit is written: on the grid with the path drawn, else a line each."""
    n = len(order)
    step = np.argsort(order)[native]  # by natural position
    if info.grid is None:
        figure, axes = plt.subplots(figsize=(6.4, max(3.5, 0.2 * n if names is not None else 0)))
        axes.scatter(np.arange(n), step, c=step, cmap="viridis", s=24)
        axes.invert_yaxis()
        axes.set_xlabel(f"{info.unit}, natural position")
        axes.set_ylabel("step it is written")
        if names is not None:
            axes.set_yticks(np.arange(n), [f"{name}  {i}" for i, name in enumerate(names[order])])
            axes.tick_params(axis="y", labelsize=8)
        axes.grid(alpha=0.3)
        axes.set_title(f"learned order of the {info.unit}s", size=10)
        save(figure, path)
        return
    rows, columns = info.grid
    figure, axes = plt.subplots(figsize=(5.2, 4.4))
    image = axes.imshow(step.reshape(rows, columns), cmap="viridis")
    y, x = np.divmod(np.argsort(step), columns)
    axes.plot(x, y, color="white", lw=1, alpha=0.6)
    for unit in range(n):
        axes.text(
            unit % columns, unit // columns, str(step[unit]), ha="center", va="center", size=7
        )
    axes.axis("off")
    axes.set_title(f"learned order of the {info.unit}s")
    figure.colorbar(image, label="step it is written")
    save(figure, path)


def dependency(
    path: pathlib.Path,
    depends: np.ndarray,
    order: np.ndarray,
    native: np.ndarray,
    reciprocal: str,
    names: np.ndarray | None,
) -> None:
    """Dependency of target on source and the reciprocal graph, in natural and in learned order.

    Args:
      names: what to call unit u, or None.
    """
    weight = graph.unit_degree(graph.reciprocal_graph(depends, reciprocal))
    figure, panels = plt.subplots(2, 2, figsize=(8, 7.4) if names is None else (15, 14))
    for row, (matrix, name) in zip(
        panels, ((depends, "dependency"), (weight, f"graph ({reciprocal})")), strict=True
    ):
        for axes, (units, label) in zip(
            row, ((native, "natural"), (order, "learned")), strict=True
        ):
            shown = matrix[np.ix_(units, units)]
            top = np.quantile(shown, 0.99) or 1.0
            axes.imshow(shown, cmap="magma", vmin=0, vmax=top, interpolation="nearest")
            axes.set_title(f"{name}, {label} order", size=10)
            axes.set_xlabel("source")
            axes.set_ylabel("target")
            if names is not None:
                axes.set_xticks(range(len(units)), names[units], rotation=90, size=7)
                axes.set_yticks(range(len(units)), names[units], size=7)
    save(figure, path)


def order_history(
    path: pathlib.Path,
    history: np.ndarray,
    steps: np.ndarray,
    native: np.ndarray,
    order_step: int,
    freeze_step: int,
) -> None:
    """One row per refresh, one column per natural position, coloured by the step it is written."""
    learned = (steps >= order_step) & (order_step >= 0)
    figure, axes = plt.subplots(figsize=(6, 4))
    if learned.any():
        rank = np.argsort(history[learned], axis=1)[:, native]
        image = axes.imshow(rank, aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(image, label="step it is written")
        shown = steps[learned]
        ticks = np.unique(np.linspace(0, len(shown) - 1, min(len(shown), 8)).astype(int))
        axes.set_yticks(ticks, [str(s) for s in shown[ticks]])
    axes.set_xlabel("natural position")
    axes.set_ylabel("training step of the refresh")
    when = f"frozen at step {freeze_step}" if freeze_step >= 0 else "not frozen"
    axes.set_title(f"the learned order over training, {when}", size=10)
    save(figure, path)
