"""The outputs of a prediction, brought to the host while later batches run."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import tree

from fitstep._errors import DataError
from fitstep.engine._runner import Executed

# Executions whose outputs may stay on the device.
_ON_DEVICE = 2


class Outputs:
    """The rows of all batches in one NumPy array for each output.

    Args:
        rows: how many there will be, if that is known; the arrays are then made once.
    """

    def __init__(self, rows: int | None):
        self._rows = rows
        self._on_device: deque[Executed] = deque()
        self._structure: Any = None
        self._parts: list[list[np.ndarray]] = []
        self._whole: list[np.ndarray] | None = None
        self._filled = 0

    def add(self, done: Executed) -> None:
        """Take over what an execution returned."""
        self._on_device.append(done)
        if len(self._on_device) > _ON_DEVICE:
            self._fetch(self._on_device.popleft())

    def result(self) -> Any:
        """The arrays in the structure of the model's outputs.

        Raises:
            DataError: if there was no batch.
        """
        while self._on_device:
            self._fetch(self._on_device.popleft())
        if self._structure is None:
            raise DataError("There is nothing to predict: the data has no batch.")
        if self._whole is not None:
            leaves = [self._filled_part(array) for array in self._whole]
        else:
            leaves = [
                parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in self._parts
            ]
        return tree.pack_sequence_as(self._structure, leaves)

    def _filled_part(self, array: np.ndarray) -> np.ndarray:
        return array if self._filled == len(array) else array[: self._filled].copy()

    def _fetch(self, done: Executed) -> None:
        outputs = _rows_of(done)
        leaves = tree.flatten(outputs)
        if self._structure is None:
            self._structure = outputs
            self._parts = [[] for _ in leaves]
            if self._rows and all(leaf.shape and leaf.shape[0] <= self._rows for leaf in leaves):
                self._whole = [
                    np.empty((self._rows, *leaf.shape[1:]), leaf.dtype) for leaf in leaves
                ]
        if self._whole is not None and not self._fits(leaves):
            # A step of the user's own that returns another number of rows than it is given.
            self._parts = [[array[: self._filled].copy()] for array in self._whole]
            self._whole = None
        if self._whole is None:
            for parts, leaf in zip(self._parts, leaves, strict=True):
                parts.append(np.array(leaf))
            return
        for array, leaf in zip(self._whole, leaves, strict=True):
            array[self._filled : self._filled + leaf.shape[0]] = leaf
        self._filled += leaves[0].shape[0]

    def _fits(self, leaves: Sequence[np.ndarray]) -> bool:
        assert self._whole is not None
        rows = {leaf.shape[0] for leaf in leaves if leaf.shape}
        kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        return (
            len(rows) == 1
            and self._filled + rows.pop() <= len(self._whole[0])
            and kinds == [(array.shape[1:], array.dtype) for array in self._whole]
        )


def joined(results: Sequence[Executed]) -> Any:
    """The outputs of several executions, row by row."""
    outputs = [_rows_of(done) for done in results]
    if len(outputs) == 1:
        return outputs[0]
    return tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)


def _rows_of(done: Executed) -> Any:
    """The outputs of one execution on the host; a number for a batch makes one row."""
    outputs = done.last if done.stacked is None else done.stacked
    if any(output is None for output in tree.flatten(outputs)):
        raise DataError(
            "An output of the model is None, which has no rows to be put together. Leave it out of "
            "what the model or `predict_step` returns, or predict with `predict_on_batch`."
        )
    if done.stacked is None:
        return tree.map_structure(lambda output: np.atleast_1d(np.asarray(output)), outputs)

    def unstacked(stack: Any) -> np.ndarray:
        made = np.asarray(stack)[: done.count]
        if made.ndim == 1:  # a number for each batch
            return made
        batches, rows, *shape = made.shape
        return made.reshape(batches * rows, *shape)

    return tree.map_structure(unstacked, outputs)
