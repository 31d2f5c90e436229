"""PNG figures of a run: loss curves, and the order in which a sample was written."""

import json
import pathlib

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)


def loss_curve(workdir: pathlib.Path) -> None:
    """`workdir/loss.png` from metrics.jsonl: training loss against the step, in nats per token."""
    entries = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    points = [(e["step"], e["train/loss"]) for e in entries if "train/loss" in e]
    if not points:
        return
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(*np.array(points).T, lw=1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token")
    axes.grid(alpha=0.3)
    save(figure, workdir / "loss.png")


def nll_curves(path: pathlib.Path, results: dict[str, dict]) -> None:
    """NLL by generation step and by distance to the nearest revealed position, a line per order."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axes, curve, label in zip(
        panels,
        ("by_step", "by_gap"),
        ("generation step", "distance to nearest revealed position"),
        strict=True,
    ):
        for name, result in results.items():
            points = [
                (i, v) for i, v in enumerate(result["curves"].get(curve, [])) if v is not None
            ]
            if points:
                axes.plot(
                    *np.array(points).T, lw=1, marker="." if curve == "by_gap" else "", label=name
                )
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[1].set_xscale("log")
    panels[0].set_ylabel("nats per token")
    if panels[0].has_data():
        panels[0].legend()
    save(figure, path)


def generation_order(path: pathlib.Path, row, info) -> None:
    """One sample: a heat map of steps on the data's grid, or its text coloured by step."""
    step = np.asarray(row.step)
    if info.grid is not None:
        figure, panels = plt.subplots(1, 2, figsize=(7, 3.2))
        for axes, values, title in zip(
            panels, (row.tokens, step), ("sample", "step it was written"), strict=True
        ):
            axes.imshow(
                info.natural(np.asarray(values)).reshape(info.grid),
                cmap="gray" if title == "sample" else "viridis",
            )
            axes.set_title(title)
            axes.axis("off")
        return save(figure, path)
    columns = 64
    rows = -(-len(step) // columns)
    figure, axes = plt.subplots(figsize=(10, 0.24 * rows + 0.6))
    padded = np.full(rows * columns, np.nan)
    padded[: len(step)] = step
    image = axes.imshow(padded.reshape(rows, columns), cmap="viridis", aspect="auto", alpha=0.6)
    for i, token in enumerate(row.tokens):
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
    figure.colorbar(image, label="step", fraction=0.02)
    axes.set_title("the step at which each position was written (-1: given)", size=9)
    return save(figure, path)


def save(figure, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
