"""A `PyDataset` with workers: its items in their order, read ahead by threads or processes.

Keras keeps what its workers have read when an epoch ends, or when it has looked at the first item,
and hands that out before the next epoch's: some items come twice in an epoch and others not at all.
Its workers also outlive a run that fails. Here each iteration has workers of its own.
"""

import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter


class OrderedItems(PyDatasetAdapter):
    """Keras's adapter of a `PyDataset`, with workers that end with the iteration they read for."""

    def __init__(self, adapter: PyDatasetAdapter):
        super().__init__(adapter.py_dataset, adapter.class_weight, adapter.shuffle)
        self.enqueuer = None
        self._looked = False

    def _get_iterator(self) -> Iterator[Any]:
        count = self.py_dataset.num_batches
        indices: Iterable[int] = itertools.count()
        if count is not None:
            indices = list(range(count))
            if self.shuffle:
                random.shuffle(indices)  # as Keras does
        return self._items(indices)

    def _items(self, indices: Iterable[int]) -> Iterator[Any]:
        dataset = self.py_dataset
        waiting: deque[Future] = deque()
        pool: Executor
        if dataset.use_multiprocessing:
            pool = ProcessPoolExecutor(dataset.workers, initializer=_hold, initargs=(dataset,))
            read = _item_of_process
        else:
            pool = ThreadPoolExecutor(dataset.workers, "fitstep-items")
            read = dataset.__getitem__
        try:
            for index in indices:
                waiting.append(pool.submit(read, index))
                # The very first item builds the model; what is read ahead then would be lost.
                if not self._looked or len(waiting) > max(dataset.max_queue_size, dataset.workers):
                    self._looked = True
                    yield self._standardize_batch(waiting.popleft().result())
            while waiting:
                yield self._standardize_batch(waiting.popleft().result())
        finally:
            pool.shutdown(cancel_futures=True)


def in_order(adapter: DataAdapter) -> DataAdapter:
    """The adapter, or one that takes the place of Keras's queue where that would be used."""
    if isinstance(adapter, PyDatasetAdapter) and adapter.enqueuer is not None:
        return OrderedItems(adapter)
    return adapter


_held: list[Any] = []  # in a worker process: the data set


def _hold(dataset: Any) -> None:
    _held[:] = [dataset]


def _item_of_process(index: int) -> Any:
    return _held[0][index]
