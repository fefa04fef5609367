"""Loaders of torch, Grain and tf.data, of which no batch is drawn beyond need.

Keras looks at the first batches of such a source in an iteration that it throws away, and reads a
map data set of Grain 500 batches ahead.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from keras import tree
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

# Enough to keep Grain's own threads busy; Grain's default is 500 batches.
_BATCHES_AHEAD = 16


class Sized(DataAdapter):
    """An adapter in the place of another of Keras's, which knows the sizes."""

    def __init__(self, adapter: DataAdapter):
        self._adapter = adapter

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._adapter.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return self._adapter.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        return self._adapter.partial_batch_size


class Stream(Sized):
    """A source that starts anew with each iteration.

    Args:
        adapter: Keras's, which knows the sizes.
        start: begins an iteration over batches that are in memory of their own.
    """

    def __init__(self, adapter: DataAdapter, start: Callable[[], Iterator[Any]]):
        super().__init__(adapter)
        self._start = start

    def get_jax_iterator(self) -> Iterator[Any]:
        yield from self._start()


def stand_in(x: Any) -> Any:
    """What Keras may look at in place of the source when it checks the arguments of a run."""
    if data_adapters.is_grain_dataset(x):
        return sys.modules["grain"].MapDataset.source([np.zeros(1)])
    return x


def stream(x: Any, adapter: DataAdapter) -> Stream | None:
    """The stream of a loader, or None for what is none."""
    if data_adapters.is_torch_dataloader(x):
        return Stream(adapter, lambda: (_as_data(batch) for batch in x))
    if data_adapters.is_grain_dataset(x):
        return Stream(adapter, lambda: (_own(batch) for batch in _grain_batches(x)))
    if data_adapters.is_tf_dataset(x):
        return Stream(adapter, lambda: (_own(batch) for batch in adapter.get_jax_iterator()))
    return None


def _grain_batches(x: Any) -> Iterator[Any]:
    grain = sys.modules["grain"]
    if isinstance(x, grain.MapDataset):  # the others read ahead as their user has said
        ahead = grain.ReadOptions(num_threads=_BATCHES_AHEAD, prefetch_buffer_size=_BATCHES_AHEAD)
        x = x.to_iter_dataset(ahead)
    iterator = iter(x)
    try:
        yield from iterator
    finally:
        if hasattr(iterator, "close"):  # ends its threads, whoever still holds it
            iterator.close()


def _as_data(batch: Any) -> Any:
    """What torch collates: a pair is a list; a dict or a tensor is `x` alone."""
    batch = _own(batch)
    if isinstance(batch, dict):
        return batch
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def _own(batch: Any) -> Any:
    """The batch in memory of its own, as arrays that JAX takes."""
    return tree.map_structure(_own_leaf, batch, none_is_leaf=False)


def _own_leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) or data_adapter_utils.is_jax_sparse(leaf):
        return leaf
    if data_adapter_utils.is_scipy_sparse(leaf):
        return data_adapter_utils.scipy_sparse_to_jax_sparse(leaf)
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        return data_adapter_utils.tf_sparse_to_jax_sparse(leaf)
    if data_adapter_utils.is_torch_tensor(leaf):
        leaf = leaf.cpu()
    return np.array(leaf)
