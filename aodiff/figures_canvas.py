"""PNG figure of accuracy against cost, for fixed canvases and rows that grow."""

import pathlib
from collections.abc import Mapping

from aodiff.figures import plt, save


def cost_figure(path: pathlib.Path, lines: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Accuracy with two standard errors against GFLOPs per row.

    lines: by line, the numbers "accuracy", "accuracy_se" and "gflops" of its named points.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for i, (name, points) in enumerate(lines.items()):
        values = list(points.values())
        cost, accuracy, error = (
            [p[key] for p in values] for key in ("gflops", "accuracy", "accuracy_se")
        )
        style = "o-" if len(points) > 1 else "D"
        axes.errorbar(
            *(cost, accuracy),
            yerr=[2 * e for e in error],
            fmt=style,
            color=f"C{i}",
            label=name,
            capsize=2,
            ms=5,
        )
        if len(points) > 1:
            for label, x, y in zip(points, cost, accuracy, strict=True):
                axes.annotate(label, (x, y), (4, -11), textcoords="offset points", size=8)
    axes.set(xlabel="GFLOP per row", ylabel="share of exact answers, +- 2 standard errors")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)
