"""Passes over the data: batches drawn when they are needed, several stacked for one execution.

Memory that was handed to a program is never written to again, since JAX on a CPU uses it as it is.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fitstep._errors import DataError
from fitstep._keras import _data, _devices

# An array source gathers about this much at once, in a thread, while the steps before it run.
_SLAB_BYTES = 4 * 2**20
_ALIGNMENT = 64  # of memory that JAX on a CPU uses without a copy


class Kind(NamedTuple):
    """What a program is compiled for: the structure of a batch, the shape and dtype of each array."""

    structure: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    @property
    def nbytes(self) -> int:
        """The size of one batch."""
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.shapes)


class Chunk(NamedTuple):
    """The batches of one execution.

    Attributes:
        leaves: the arrays of one batch, or stacks of `width` each, of which `count` are batches.
        width: 1 if nothing is stacked; a stack of one batch would be another program's.
    """

    leaves: tuple[Any, ...]
    kind: Kind
    count: int = 1
    width: int = 1


def kind_of(leaves: list[Any], structure: Any) -> Kind:
    """The kind of a flattened batch."""
    return Kind(
        structure,
        tuple((leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves),
    )


def one_batch(batch: Any, *, placed: bool = True) -> Chunk:
    """A batch that is there already.

    Args:
        placed: bring it to the devices of Keras's distribution.
    """
    leaves, structure = jax.tree.flatten(batch)
    kind = kind_of(leaves, structure)
    return Chunk(tuple(_devices.placed(leaves) if placed else leaves), kind)


class _Pass(Protocol):
    """Once over the data."""

    drawn: int

    def peek(self) -> Kind | None:
        """The kind of the next batch; None at the end."""

    def next_batch(self) -> Any:
        """The next batch as it is, still to be drawn."""

    def draw(
        self, most: int, width: int, *, left: int | None = None, prompt: bool = False
    ) -> Chunk:
        """The next batches, up to `most` of one kind, in a stack if `width` is more than 1.

        Args:
            left: how many batches the epoch or round has left, with these; rows beyond its end are
                not looked at, since a callback may change the data there.
            prompt: look at no rows beyond them, since somebody may change the data between steps.
        """
        ...

    def close(self) -> None:
        """Draw no more."""


class _ArrayPass:
    """Once over arrays, whose rows are gathered ahead."""

    def __init__(self, source: _data.ArraySource):
        self.drawn = 0
        self._source = source
        self._order = source.order()
        self._row = 0  # the first that was not drawn
        self._slab: list[np.ndarray] = []
        self._slab_rows = (0, 0)
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, int, Future[list[np.ndarray]]] | None = None

    def peek(self) -> Kind | None:
        size = min(self._source.batch_size, self._source.rows - self._row)
        return kind_of_rows(self._source, size) if size else None

    def next_batch(self) -> Any:
        kind = self.peek()
        assert kind is not None
        rows = min(self._source.batch_size, self._source.rows - self._row)
        leaves = self._gathered(self._row, self._row + rows, 0)
        return jax.tree.unflatten(kind.structure, leaves)

    def draw(
        self, most: int, width: int, *, left: int | None = None, prompt: bool = False
    ) -> Chunk:
        size = min(self._source.batch_size, self._source.rows - self._row)
        full = size == self._source.batch_size
        width = width if full else 1
        kind = kind_of_rows(self._source, size)
        if not full or (prompt and width == 1):
            count, leaves = 1, self._gathered(self._row, self._row + size, 0)
        else:
            start = self._row - self._slab_rows[0]
            used_up = self._row >= self._slab_rows[1]  # what is behind has room, and no rows
            if used_up or start + width * size > len(self._slab[0]):
                self._next_slab(kind, width, left)
                start = 0
            count = min(most, (self._slab_rows[1] - self._row) // size) if width > 1 else 1
            # A stack may overlap the next one: what is beyond its count is not looked at.
            leaves = [leaf[start : start + width * size] for leaf in self._slab]
        self._row += count * size
        self.drawn += count
        if width > 1:
            leaves = [leaf.reshape(width, size, *leaf.shape[1:]) for leaf in leaves]
        return Chunk(tuple(_devices.placed(leaves, stacked=width > 1)), kind, count, width)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = self._ahead = None

    def _next_slab(self, kind: Kind, width: int, left: int | None) -> None:
        size = self._source.batch_size
        batches = max(width, _SLAB_BYTES // max(kind.nbytes, 1) // width * width)
        end = self._source.rows // size * size  # of the full batches
        if left is not None:
            end = min(end, self._row + left * size)
        room = (width - 1) * size
        stop = min(self._row + batches * size, end)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self._row and ahead[1] >= room:
            self._slab = ahead[2].result()
        else:
            self._slab = self._gathered(self._row, stop, room)
        self._slab_rows = (self._row, stop)
        if stop < end:
            self._pool = self._pool or ThreadPoolExecutor(1, "fitstep-feed")
            following = min(stop + batches * size, end)
            gathering = self._pool.submit(self._gathered, stop, following, room)
            self._ahead = stop, room, gathering

    def _gathered(self, start: int, stop: int, room: int) -> list[np.ndarray]:
        """The rows in new memory, with room for more behind them."""
        rows = slice(start, stop) if self._order is None else self._order[start:stop]
        return self._source.gathered(rows, stop - start, room, _aligned)


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    memory = np.empty(int(np.prod(shape)) * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + memory.size - _ALIGNMENT].view(dtype).reshape(shape)


def kind_of_rows(source: _data.ArraySource, rows: int) -> Kind:
    if rows not in source.kinds:
        leaves, structure = source.first(rows)
        source.kinds[rows] = kind_of(leaves, structure)
    return source.kinds[rows]


class _BatchPass:
    """Once over a source that yields its batches one by one."""

    def __init__(self, source: _data.BatchSource, limit: int | None):
        self.drawn = 0
        self._batches = source.batches()
        self._limit = limit
        self._checked = source.checked
        self._stacked = source.stacked
        self._pending: tuple[list[Any], Kind] | None = None
        self._error: Exception | None = None

    def peek(self) -> Kind | None:
        if self._error is not None:
            raise self._error
        if self._pending is None and (self._limit is None or self.drawn < self._limit):
            for batch in self._batches:
                leaves, structure = jax.tree.flatten(batch)
                kind = kind_of(leaves, structure)
                if kind not in self._checked:
                    _data.check_numbers(batch)
                    self._checked.add(kind)
                self._pending = leaves, kind
                break
        return self._pending[1] if self._pending else None

    def next_batch(self) -> Any:
        assert self._pending is not None
        leaves, kind = self._pending
        return jax.tree.unflatten(kind.structure, leaves)

    def draw(
        self, most: int, width: int, *, left: int | None = None, prompt: bool = False
    ) -> Chunk:
        kind = self.peek()
        batches = []
        # Nothing is drawn before it is needed: the last look is at the last batch.
        while len(batches) < most and self._pending is not None and self.peek() == kind:
            batches.append(self._pending[0])
            self._pending = None
            self.drawn += 1
            if len(batches) < most:
                try:
                    self.peek()
                except Exception as error:  # noqa: BLE001 - raised when its batch's turn comes
                    self._error = error
        assert kind is not None
        if width == 1 or (len(batches) == 1 and kind not in self._stacked):
            return Chunk(tuple(_devices.placed(batches[0])), kind)
        self._stacked.add(kind)
        stacks = []
        for place, (shape, dtype) in enumerate(kind.shapes):
            stack = _aligned((width, *shape), dtype)
            for i, leaves in enumerate(batches):
                stack[i] = leaves[place]
            stacks.append(stack)
        return Chunk(tuple(_devices.placed(stacks, stacked=True)), kind, len(batches), width)

    def close(self) -> None:
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


class Passes:
    """One pass after another, each begun when its first batch is needed."""

    def __init__(self, source: _data.Source):
        self.source = source
        self._pass: _Pass | None = None
        self._told = False  # the source was told that an epoch begins

    @property
    def drawn(self) -> int:
        """The batches of this pass that were drawn."""
        return self._pass.drawn if self._pass else 0

    def tell_begin(self) -> None:
        if not self._told:
            self.source.begin()
            self._told = True

    def tell_end(self) -> None:
        if self._told:
            self._told = False
            self.source.end()

    def restart(self) -> None:
        """Begin with a new pass; a source that shuffles when an epoch ends is told that one has."""
        if self.source.listens:
            self.end()
            self._told = False
            self.source.end()
        elif self.drawn or isinstance(self.source, _data.ArraySource):
            self.end()  # arrays are shuffled anew after a look at them, as in Keras

    def peek(self) -> Kind | None:
        """The kind of this pass's next batch; None at its end."""
        if self._pass is None:
            self.tell_begin()
            if isinstance(self.source, _data.ArraySource):
                self._pass = _ArrayPass(self.source)
            else:
                self._pass = _BatchPass(self.source, self.source.num_batches)
        return self._pass.peek()

    def draw(
        self, most: int, width: int, *, left: int | None = None, prompt: bool = False
    ) -> Chunk:
        assert self._pass is not None
        return self._pass.draw(most, width, left=left, prompt=prompt)

    def next_batch(self) -> Any:
        """The next batch as it is, still to be drawn."""
        assert self._pass is not None
        return self._pass.next_batch()

    def first_batch(self) -> Any:
        """The first batch, to build the model on; it is still the first to be drawn."""
        if self.peek() is None:
            raise DataError("The data has no batch: `x` is empty. Give at least one row.")
        return self.next_batch()

    def close(self) -> None:
        """End what is under way, and say so to the source."""
        self.end()
        self.tell_end()

    def end(self) -> None:
        """End this pass; the next begins anew."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None
