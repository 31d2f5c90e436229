"""PNG figures of a learned order: where it goes, what it rests on, and how it was found."""

import itertools
import json
import pathlib

import numpy as np

from aodiff.core import graph, spectral
from aodiff.core.orders import kendall_tau
from aodiff.data import DataInfo
from aodiff.figures import plt, save
from aodiff.figures_layout import COLORS, LABELLED, STEP, learned_order, natural_steps
from aodiff.methods.order_state import OrderState


def write_order(
    workdir: pathlib.Path, state: OrderState, reciprocal: str, info: DataInfo, row: np.ndarray
) -> None:
    """Writes order.json and the figures order, dependency, fiedler, priority, order_history.

    Args:
      workdir: the run.
      state: the method's state; any arrays.
      reciprocal: `config.method.reciprocal`, the way the graph joins the two directions of a pair.
      info: names the units and holds the permutation that hid them from the model.
      row: (L,) one row of ids, as the model sees it.
    """
    order = np.asarray(state.order)
    (workdir / "order.json").write_text(json.dumps(order.tolist()))
    native = info.natural(np.arange(info.seq_len))  # the units in natural order
    depends = graph.dependency(
        np.asarray(state.excess, np.float64).sum(0), np.asarray(state.count, np.float64).sum(0)
    )
    weight = graph.unit_degree(graph.reciprocal_graph(depends, reciprocal))
    names = None
    if info.names is not None and info.seq_len <= LABELLED:
        # Names come in natural order; units are numbered by the hidden permutation.
        names = np.array(info.names)[np.argsort(native)]
    learned_order(workdir / "order.png", order, info, row)
    dependency(workdir / "dependency.png", depends, weight, order, native, reciprocal, names)
    fiedler(workdir / "fiedler.png", weight, order, info)
    known = np.asarray(state.history_step) >= 0
    past = (
        np.asarray(state.history)[known],
        np.asarray(state.history_step)[known],
        int(state.order_step),
        int(state.freeze_step),
        info,
    )
    priority(workdir / "priority.png", *past)
    order_history(workdir / "order_history.png", *past)


def dependency(
    path: pathlib.Path,
    depends: np.ndarray,
    weight: np.ndarray,
    order: np.ndarray,
    native: np.ndarray,
    reciprocal: str,
    names: np.ndarray | None,
) -> None:
    """Dependency of target on source and the reciprocal graph, in natural and in learned order.

    Args:
      depends, weight: (L, L), the dependency and the graph that is made of it.
      order, native: (L,) units in learned and in natural order.
      reciprocal: how the graph joins both directions.
      names: what to call unit u, or None.
    """
    side = np.array([2.2, 2.0]) * max(4.5, 2.2 + 0.15 * len(order))
    figure, panels = plt.subplots(2, 2, figsize=(9.4, 8) if names is None else side)
    kinds = (
        (depends, "dependency", "attention beyond a uniform share"),
        (weight, f"graph ({reciprocal})", "weight, mean degree 1"),
    )
    for row, (matrix, name, unit) in zip(panels, kinds, strict=True):
        for axes, (units, label) in zip(
            row, ((native, "natural"), (order, "learned")), strict=True
        ):
            shown = matrix[np.ix_(units, units)]
            top = np.quantile(shown, 0.99) or 1.0
            image = axes.imshow(shown, cmap="magma", vmin=0, vmax=top, interpolation="nearest")
            axes.set_title(f"{name}, {label} order", size=10)
            axes.set_xlabel("source")
            axes.set_ylabel("target")
            if names is not None:
                axes.set_xticks(range(len(units)), names[units], rotation=90, size=7)
                axes.set_yticks(range(len(units)), names[units], size=7)
            bar = figure.colorbar(image, fraction=0.046, pad=0.03)
            bar.ax.tick_params(labelsize=7)
            bar.set_label(unit, size=8)
    save(figure, path)


def fiedler(path: pathlib.Path, weight: np.ndarray, order: np.ndarray, info: DataInfo) -> None:
    """The Fiedler vector of the whole graph by natural position and by step of the order."""
    step = natural_steps(order, info)
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True)
    if len(order) > 2 and weight.any():
        vector, lambda_2, lambda_3 = spectral.fiedler(weight)
        vector = info.natural(vector)
        ratio = lambda_2 / lambda_3 if lambda_3 > 1e-9 else 0.0
        figure.suptitle(
            rf"Fiedler vector of the graph, $\lambda_2$ = {max(lambda_2, 0):.3g}, "
            rf"$\lambda_3$ = {max(lambda_3, 0):.3g}, ratio {ratio:.2f}"
            + (": nearly in parts" if ratio < spectral.SPLIT else ""),
            size=11,
        )
        for axes, x in zip(panels, (np.arange(len(step)), step), strict=True):
            image = axes.scatter(x, vector, c=step, cmap=COLORS, s=24, zorder=2)
        panels[1].plot(np.arange(len(step)), vector[np.argsort(step)], color="0.8", lw=1, zorder=1)
        figure.colorbar(image, label=STEP)
    else:
        figure.suptitle("no graph, hence no Fiedler vector", size=11)
    panels[0].set_ylabel("Fiedler vector")
    panels[0].set_xlabel(f"{info.unit}, natural position")
    panels[1].set_xlabel(f"step it is written (learned order of the {info.unit}s)")
    for axes in panels:
        axes.grid(alpha=0.3)
    save(figure, path)


def priority(
    path: pathlib.Path,
    history: np.ndarray,
    steps: np.ndarray,
    order_step: int,
    freeze_step: int,
    info: DataInfo,
) -> None:
    """The priority of every unit over training, 1 for the first to be written; arguments as in
    `order_history`."""
    learned = (steps >= order_step) & (order_step >= 0)
    figure, axes = plt.subplots(figsize=(8.5, max(4.0, 0.15 * min(info.seq_len, LABELLED))))
    if learned.any():
        past = np.stack([natural_steps(order, info) for order in history[learned]])
        last, n = past[-1], max(past.shape[1] - 1, 1)
        cmap = plt.get_cmap(COLORS)
        for i in range(past.shape[1]):
            axes.plot(steps[learned], 1 - past[:, i] / n, color=cmap(last[i] / n), lw=1.2)
        if past.shape[1] <= LABELLED:
            names = info.names or [f"{info.unit} {i}" for i in range(past.shape[1])]
            place = axes.secondary_yaxis("right")
            place.set_yticks(1 - last / n, [f"{last[i]}  {name}" for i, name in enumerate(names)])
            place.tick_params(labelsize=7, length=0)
        else:
            scale = plt.cm.ScalarMappable(plt.Normalize(0, n), COLORS)
            figure.colorbar(scale, ax=axes, label=f"last {STEP}")
    _mark_freeze(axes.axvline, freeze_step)
    axes.set_xlabel("training step of the refresh")
    axes.set_ylabel("priority by rank, 1 is written first")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.set_title(f"priorities over training, {_frozen(freeze_step)}", size=11)
    save(figure, path)


def order_history(
    path: pathlib.Path,
    history: np.ndarray,
    steps: np.ndarray,
    order_step: int,
    freeze_step: int,
    info: DataInfo,
) -> None:
    """One row per refresh, one column per natural position, coloured by the step it is written.

    Args:
      history: (refreshes, L) the unit written at each step.
      steps: (refreshes,) training steps.
      order_step, freeze_step: when there was a first order, and when it froze; -1 for not yet.
    """
    learned = (steps >= order_step) & (order_step >= 0)
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    if learned.any():
        rank = np.stack([natural_steps(order, info) for order in history[learned]])
        image = axes.imshow(rank, aspect="auto", cmap=COLORS, interpolation="nearest")
        figure.colorbar(image, label=STEP)
        shown = steps[learned]
        ticks = np.unique(np.linspace(0, len(shown) - 1, min(len(shown), 8)).astype(int))
        axes.set_yticks(ticks, [str(s) for s in shown[ticks]])
    axes.set_xlabel(f"{info.unit}, natural position")
    axes.set_ylabel("training step of the refresh")
    axes.set_title(f"the learned order over training, {_frozen(freeze_step)}", size=11)
    save(figure, path)


def stability(path: pathlib.Path, orders: np.ndarray, info: DataInfo) -> None:
    """The step of each natural position in the orders of several runs, most agreed first to last.

    Args:
      orders: (runs, L) the natural position written at each step of each run. A run that agrees
        better with the first when read backwards is shown backwards.
      info: names the natural positions.
    """
    orders = np.asarray(orders)
    pairs = [abs(kendall_tau(a, b)) for a, b in itertools.combinations(orders, 2)]
    backwards = np.array([kendall_tau(order, orders[0]) < 0 for order in orders])
    step = np.argsort(np.where(backwards[:, None], orders[:, ::-1], orders), axis=1)  # (runs, L)
    line = np.argsort(step.mean(0), kind="stable")
    n = len(line)
    x, shown = np.arange(n), step[:, line]
    figure, axes = plt.subplots(figsize=(np.clip(1.5 + 0.2 * n, 6, 14), 4.8))
    axes.vlines(x, shown.min(0), shown.max(0), color="0.8", lw=3, zorder=1)
    for run in shown:
        axes.scatter(x, run, color="C0", s=16, alpha=0.6, linewidth=0, zorder=2)
    axes.plot(x, shown.mean(0), "_", color="black", ms=8, zorder=3, label="mean")
    if n <= LABELLED:
        names = info.names or range(n)
        axes.set_xticks(x, [names[i] for i in line], rotation=90, size=7)
        axes.set_xlabel("" if info.names else f"{info.unit}, natural position")
    else:
        axes.set_xlabel(f"{info.unit}s by mean step")
    axes.margins(x=0.01)
    axes.invert_yaxis()
    axes.set_ylabel(STEP)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(loc="upper right", frameon=False)
    agreement = f", mean |tau| of pairs {np.mean(pairs):.2f}" if pairs else ""
    note = f" ({backwards.sum()} read backwards)" if backwards.any() else ""
    axes.set_title(f"learned orders of {len(orders)} runs{note}{agreement}", size=11)
    save(figure, path)


def _frozen(step: int) -> str:
    return f"frozen at step {step}" if step >= 0 else "not frozen"


def _mark_freeze(draw, step: int) -> None:
    if step >= 0:
        draw(step, color="0.3", lw=1, ls="--")
