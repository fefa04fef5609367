"""The mean over the rows of an epoch of those logs of a step that are no metrics.

Keras's own loop keeps the last batch's value of every log as soon as one of them is no metric.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def no_means(count: int) -> tuple[jax.Array, jax.Array]:
    """The running means before the first batch: the means and the rows that they stand for."""
    return jnp.zeros((count,)), jnp.zeros(())


def updated_means(
    means: tuple[jax.Array, jax.Array], values: Sequence[Any], rows: int
) -> tuple[jax.Array, jax.Array]:
    """Running means, weighted by rows, after one more batch."""
    mean, total = means
    total = total + rows
    new = jnp.stack([jnp.asarray(value, mean.dtype) for value in values])
    return mean + (new - mean) * (rows / total), total


def combined(
    parts: Sequence[tuple[Sequence[str], tuple[jax.Array, jax.Array]]],
) -> dict[str, float]:
    """One mean for each name, from running means that each stand for some of the rows."""
    sums: dict[str, float] = {}
    rows: dict[str, float] = {}
    for names, (means, total) in parts:
        weight = float(total)
        for name, mean in zip(names, np.asarray(means).tolist(), strict=True):
            sums[name] = sums.get(name, 0.0) + mean * weight
            rows[name] = rows.get(name, 0.0) + weight
    return {name: value / rows[name] for name, value in sums.items()}
