"""Tables: likelihood per row, and whether rows the model wrote can stand for rows of the table.

Real rows and samples are compared after the codec (numbers are medians of their bins), so that
nothing is measured of the codec. Source: ordergpt.md section 17, tabular.
"""

import numpy as np

from aodiff.data import DataInfo
from aodiff.data.codecs import Bins, Columns
from aodiff.evals import compare
from aodiff.evals.trained import Trained

TRAIN_ROWS = 10_000  # at most, for what is compared with the training split


def fits(info: DataInfo) -> bool:
    """Whether the data have columns."""
    return isinstance(info.codec, Columns)


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of a table; "..._data" are those of training rows in the place of samples.

    nats_per_row: as evaluated on `eval.split`; density_nats_per_row: numbers as densities.
    tstr, trtr: boosting trained on samples and on as many real rows, tested on `eval.split`.
    auc_*: can samples be told from rows of `eval.split`; 0.5 is best.
    association_error, marginal_error: to rows of `eval.split`; 0 is best, "_data" is the noise.
    nearest_ratio: distance to training rows, over that of unseen rows; 0 for copies.
    """
    codec, split = trained.info.codec, trained.config.eval.split
    ids, present = trained.rows(split)
    real, categorical = values_of(codec, ids, present), is_categorical(codec)
    train = values_of(codec, *trained.rows("train", TRAIN_ROWS))
    # Samples miss the cells that real rows miss, else that alone would tell them apart.
    written = trained.samples.tokens
    fake = values_of(codec, written, present[np.arange(len(written)) % len(present)])
    label = label_column(codec)
    num = min(len(train), len(fake))
    found = {
        "nats_per_row": trained.nats_per_row,
        "density_nats_per_row": trained.nats_per_row + log_widths(codec, ids, present).mean(),
        "tstr": compare.efficacy(fake[:num], real, categorical, label),
        "trtr": compare.efficacy(train[:num], real, categorical, label),
    }
    if found["trtr"] > 0:
        found["tstr_ratio"] = found["tstr"] / found["trtr"]
    auc = compare.detection_auc(real, fake, categorical)
    found |= {f"auc_{name}": value for name, value in auc.items()}
    for name, rows in {"": fake, "_data": train[:num]}.items():
        found[f"association_error{name}"] = compare.association_error(real, rows, categorical)
        found[f"marginal_error{name}"] = compare.marginal_error(real, rows, categorical)
    return found | {"nearest_ratio": compare.nearest_ratio(train, real, fake, categorical)}


def is_categorical(codec: Columns) -> np.ndarray:
    """Which columns hold categories, (L,) bool."""
    return np.array([not isinstance(column, Bins) for column in codec.columns])


def label_column(codec: Columns) -> int:
    """The column called "label", else the last one."""
    return codec.names.index("label") if "label" in codec.names else len(codec.names) - 1


def values_of(codec: Columns, ids: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Rows of ids as medians of bins and numbers of categories, NaN where missing; float64."""
    columns = [
        column.decode(i) if isinstance(column, Bins) else i
        for column, i in zip(codec.columns, ids.T, strict=True)
    ]
    return np.where(present, np.stack(columns, axis=1).astype(np.float64), np.nan)


def log_widths(codec: Columns, ids: np.ndarray, present: np.ndarray) -> np.ndarray:
    """What makes the nats of a row those of a density, (rows,): log of its bins' widths."""
    logs = [column.log_widths[i] for column, i in zip(codec.columns, ids.T, strict=True)]
    return np.where(present, np.stack(logs, axis=1), 0.0).sum(axis=1)
