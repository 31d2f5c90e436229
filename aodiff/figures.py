"""PNG figures of a run: loss and likelihood curves."""

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


def save(figure, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
