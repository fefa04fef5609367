"""The mean over the rows of an epoch of those logs of a step that are no metrics.

Keras's own loop keeps the last batch's value of every log as soon as one of them is no metric.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


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
