"""Frames and series of polars as arrays, in polars's own memory where nothing has to change."""

import sys
from typing import Any

import numpy as np

from fitstep.data._columns import (
    Remedies,
    as_table,
    in_lists,
    missing,
    no_numbers,
    within,
)

REMEDIES = Remedies(
    fill="Fill them with `fill_null(0)`, or drop their rows with `drop_nulls()`.",
    numbers="Convert numbers with `cast(pl.Float32)`; encode text, categories and dates first.",
)


def from_frame(frame: Any, place: str) -> np.ndarray:
    """(rows, columns), or the one column's shape where it holds lists."""
    columns = frame.iter_columns()
    return as_table(place, {c.name: from_series(c, within(place, c.name)) for c in columns})


def from_series(series: Any, place: str) -> np.ndarray:
    """(rows,), or (rows, length) of lists that are equally long."""
    polars = sys.modules["polars"]
    if count := series.null_count():
        raise missing(place, count, REMEDIES)
    dtype = series.dtype
    if isinstance(dtype, polars.Array | polars.List):
        if isinstance(dtype, polars.Array):
            widths: Any = [dtype.shape[0]]
        else:
            widths = series.list.len().unique().to_numpy()
        # An empty list would stand for one null among the values.
        values = np.empty(0) if 0 in widths else from_series(series.explode(), place)
        return in_lists(place, values, len(series), widths)
    known = dtype.is_integer() or dtype.is_float() or dtype == polars.Boolean
    if not known or "128" in str(dtype):  # NumPy has no such integers
        example = series[0] if len(series) else None
        raise no_numbers(place, dtype, example, REMEDIES)
    return series.to_numpy()
