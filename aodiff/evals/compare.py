"""How alike two sets of rows are: can a classifier tell them apart, do columns and pairs agree.

Rows are (rows, columns) float64 with NaN where a cell is missing; `categorical` (columns,) bool
says which columns hold category numbers. Source: ordergpt.md section 17, tabular.
"""

from typing import Any

import numpy as np

FOLDS = 5
ONE_THREAD = dict(limits=1, user_api="openmp")  # on so few rows, threads only wait for each other
BOOST_CATEGORIES = 255  # the most a column of scikit-learn's boosting may have


def detection_auc(real: np.ndarray, fake: np.ndarray, categorical: np.ndarray) -> dict[str, float]:
    """Cross-validated AUC of telling `fake` from `real`, in equal numbers; 0.5 is best, 1 worst.

    Returns it by classifier: "logistic" sees columns one by one, "boosting" also how they interact.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from threadpoolctl import threadpool_limits

    num = min(len(real), len(fake))
    rows = np.concatenate([real[:num], fake[:num]])
    is_fake = np.repeat([0, 1], num)
    models = {
        "logistic": make_pipeline(encoder(categorical), LogisticRegression(max_iter=300)),
        "boosting": boosting(rows, categorical, classes=True),
    }
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    with threadpool_limits(**ONE_THREAD):
        return {
            name: float(cross_val_score(model, rows, is_fake, scoring="roc_auc", cv=folds).mean())
            for name, model in models.items()
        }


def efficacy(train: np.ndarray, test: np.ndarray, categorical: np.ndarray, label: int) -> float:
    """How well boosting trained on `train` predicts column `label` of `test` from the others.

    Balanced accuracy for a categorical label (chance is one over the classes), else R squared.
    Rows without a label are left out.
    """
    from sklearn.metrics import balanced_accuracy_score, r2_score
    from threadpoolctl import threadpool_limits

    train, test = (rows[~np.isnan(rows[:, label])] for rows in (train, test))
    others = np.arange(train.shape[1]) != label
    classes = bool(categorical[label])
    model = boosting(train[:, others], categorical[others], classes)
    if len(np.unique(train[:, label])) == 1:  # nothing to learn but the one value there is
        guess = np.repeat(train[:1, label], len(test))
    else:
        with threadpool_limits(**ONE_THREAD):
            guess = model.fit(train[:, others], train[:, label]).predict(test[:, others])
    score = balanced_accuracy_score if classes else r2_score
    return float(score(test[:, label], guess))


def boosting(rows: np.ndarray, categorical: np.ndarray, classes: bool) -> Any:
    """An untrained gradient boosting model of scikit-learn for these columns."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    few = np.nanmax(np.append(rows, np.zeros((1, rows.shape[1])), axis=0), axis=0)
    return kind(
        max_iter=60,
        early_stopping=False,
        categorical_features=categorical & (few < BOOST_CATEGORIES),
        random_state=0,
    )


def encoder(categorical: np.ndarray) -> Any:
    """Standardised numbers (missing: the mean) and one-hot categories, as a transformer."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_column_transformer((numbers, ~categorical), (hot, categorical))


def associations(rows: np.ndarray, categorical: np.ndarray) -> np.ndarray:
    """Association of every pair of columns (columns, columns), over rows where both are there.

    Pearson for two numeric columns, Cramer's V for two categorical ones, the correlation ratio for
    one of each; 0 where a column is constant.
    """
    size = rows.shape[1]
    found = np.eye(size)
    for i in range(size):
        for j in range(i):
            both = ~np.isnan(rows[:, i]) & ~np.isnan(rows[:, j])
            a, b = rows[both, i], rows[both, j]
            if len(a) and np.ptp(a) > 0 and np.ptp(b) > 0:
                found[i, j] = found[j, i] = _association(a, b, categorical[i], categorical[j])
    return found


def _association(a: np.ndarray, b: np.ndarray, a_is_category: bool, b_is_category: bool) -> float:
    from scipy.stats.contingency import association, crosstab

    if a_is_category and b_is_category:
        return float(association(crosstab(a, b).count, method="cramer"))
    if b_is_category:
        return _correlation_ratio(b, a)
    return _correlation_ratio(a, b) if a_is_category else float(np.corrcoef(a, b)[0, 1])


def _correlation_ratio(category: np.ndarray, value: np.ndarray) -> float:
    """Share of the standard deviation of `value` that its category explains."""
    _, group = np.unique(category, return_inverse=True)
    means = np.bincount(group, value) / np.bincount(group)
    return float(np.std(means[group]) / np.std(value))


def association_error(real: np.ndarray, fake: np.ndarray, categorical: np.ndarray) -> float:
    """Mean absolute difference of the associations of all pairs of columns, 0 to 2."""
    pairs = np.tril_indices(real.shape[1], -1)
    difference = associations(real, categorical) - associations(fake, categorical)
    return float(np.abs(difference[pairs]).mean())


def marginal_error(real: np.ndarray, fake: np.ndarray, categorical: np.ndarray) -> float:
    """Mean over columns of total variation (categories) or of Kolmogorov-Smirnov's distance."""
    from scipy.stats import ks_2samp

    errors = []
    for is_category, a, b in zip(categorical, real.T, fake.T, strict=True):
        a, b = a[~np.isnan(a)], b[~np.isnan(b)]
        if not (len(a) and len(b)):
            continue
        errors.append(total_variation(a, b) if is_category else ks_2samp(a, b).statistic)
    return float(np.mean(errors))


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Total variation distance of the values of two lists, 0 to 1."""
    values, index = np.unique(np.concatenate([a, b]), return_inverse=True)
    share = [np.bincount(i, minlength=len(values)) for i in np.split(index, [len(a)])]
    return float(0.5 * np.abs(share[0] / len(a) - share[1] / len(b)).sum())


def nearest_ratio(
    train: np.ndarray, real: np.ndarray, fake: np.ndarray, categorical: np.ndarray
) -> float:
    """Median distance of `fake` to the closest row of `train`, over that of the unseen `real`.

    About 1 for rows as new as unseen ones, about 0 for copies of what the model was trained on.
    """
    from sklearn.neighbors import NearestNeighbors

    encode = encoder(categorical).fit(train)
    near = NearestNeighbors(n_neighbors=1).fit(encode.transform(train))
    far = [np.median(near.kneighbors(encode.transform(rows))[0]) for rows in (fake, real)]
    return float(far[0] / max(far[1], 1e-12))
