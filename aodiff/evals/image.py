"""Images: bits per dimension, samples beside data, and whether a classifier tells them apart."""

import pathlib

import jax
import numpy as np

from aodiff.data import DataInfo
from aodiff.evals import compare
from aodiff.evals.trained import Trained
from aodiff.figures import plt, save

SHOWN = 64  # images of each kind, in a square


def fits(info: DataInfo) -> bool:
    """Whether rows are images."""
    return info.grid is not None and info.codec is not None


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of images, and `samples.png` with samples beside images of `eval.split`.

    bits_per_dim: on `eval.split`.
    mean_image_error: mean absolute difference of mean images, as a share of the range of levels;
      "_data": of training rows.
    auc_*: can samples be told from images of `eval.split`; 0.5 is best.
    """
    real, _ = trained.rows(trained.config.eval.split)
    train, _ = trained.rows("train", trained.config.eval.samples)
    fake = trained.samples.tokens
    if jax.process_index() == 0:
        sheets = {"samples": fake, trained.config.eval.split: real}
        contact_sheet(trained.workdir / "samples.png", sheets, trained.info)
    found = {"bits_per_dim": trained.own["bits_per_token"]}
    scale = trained.info.vocab_size - 1
    for name, rows in {"": fake, "_data": train}.items():
        difference = np.abs(real.mean(axis=0) - rows.mean(axis=0))
        found[f"mean_image_error{name}"] = difference.mean() / scale
    numeric = np.zeros(real.shape[1], bool)
    auc = compare.detection_auc(real.astype(float), fake.astype(float), numeric)
    return found | {f"auc_{name}": value for name, value in auc.items()}


def contact_sheet(path: pathlib.Path, sheets: dict[str, np.ndarray], info: DataInfo) -> None:
    """A square of images for each set of rows (rows, L), ids in natural order."""
    figure, panels = plt.subplots(1, len(sheets), figsize=(4.5 * len(sheets), 4.8))
    for axes, (name, rows) in zip(np.atleast_1d(panels), sheets.items(), strict=True):
        axes.imshow(tiled(rows[:SHOWN], info.grid), cmap="gray", vmin=0, vmax=info.vocab_size - 1)
        axes.set_title(name)
        axes.axis("off")
    save(figure, path)


def tiled(rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Images (rows, L) side by side in a square with a line of nothing between them, float64."""
    side = int(np.ceil(np.sqrt(len(rows))))
    height, width = grid[0] + 1, grid[1] + 1
    sheet = np.full((side * height - 1, side * width - 1), np.nan)
    for i, row in enumerate(rows):
        top, left = i // side * height, i % side * width
        sheet[top : top + grid[0], left : left + grid[1]] = row.reshape(grid)
    return sheet
