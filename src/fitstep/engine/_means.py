"""The mean over the rows of an epoch of those logs of a step that are no metrics.

Keras's own loop keeps the last batch's value of every log as soon as one of them is no metric.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Means:
    """The running means of one epoch; which logs they are of may change with the batch's shape.

    Attributes:
        running: the means of the present logs and the rows that they stand for, for a program.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start a new epoch."""
        self.running: Any = ()
        self._names: tuple[str, ...] = ()
        self._finished: list[tuple[tuple[str, ...], Any]] = []
        self._wanted: set[str] = set()

    def use(self, names: tuple[str, ...], wanted: Iterable[str]) -> None:
        """Average the logs of these names from now on; `wanted` are those to be asked for."""
        self._wanted.update(wanted)
        if names == self._names:
            return
        if self._names:
            self._finished.append((self._names, self.running))
        self._names = names
        self.running = no_means(len(names)) if names else ()

    def add(self, values: Sequence[Any], rows: int) -> None:
        """One more batch, outside a program."""
        if self._names:
            self.running = updated_means(self.running, values, rows)

    def result(self) -> dict[str, float]:
        """The mean of each log that was wanted."""
        if not self._wanted:
            return {}
        self.use((), ())
        means = combined(self._finished)
        return {name: means[name] for name in sorted(self._wanted)}


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
    # What stays the same stays so, and a mean with an infinity in it is infinite.
    stays = (new == mean) | (jnp.isinf(mean) & jnp.isfinite(new))
    return mean + jnp.where(stays, 0.0, (new - mean) * (rows / total)), total


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
