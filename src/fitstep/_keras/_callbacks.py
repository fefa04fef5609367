"""The batch hooks of a list of callbacks: who listens, and whether steps may run ahead of them."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras import tree
from keras.src.callbacks import ProgbarLogger
from keras.src.utils.python_utils import is_default

# How many executions callbacks that only read logs may lag behind.
LAG = 16

_READERS = (ProgbarLogger, keras.callbacks.History, keras.callbacks.CSVLogger)
_SAVERS = tuple(
    cls
    for name in ("ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint")
    if (cls := getattr(keras.callbacks, name, None)) is not None
)


def announce_steps(callbacks: Any, steps: int | None) -> None:
    """Let the progress bar count to the steps of an epoch that has fewer than the others."""
    if type(callbacks) is not keras.callbacks.CallbackList or steps is None:
        return
    if callbacks.params.get("steps") not in (None, steps):
        callbacks.set_params({**callbacks.params, "steps": steps})


class BatchHooks:
    """The two batch hooks of one mode, of all callbacks of a list at once.

    Asking Keras's list costs more than a small step does, and a thread per step, which it uses for
    callbacks that only read logs, more still. So a hook that nobody listens to is not called, and
    listeners that only read logs are called late, in order, once the logs are there.

    Args:
        callbacks: a `keras.callbacks.CallbackList`, or something else that has the hooks.
        mode: `"train"`, `"test"` or `"predict"`.

    Attributes:
        begins, ends: whether somebody listens to the hook.
        obstacle: why steps may not run ahead of the hooks; None if they may.
        halts: whether the steps are to end where the loss is not finite.
    """

    def __init__(self, callbacks: Any, mode: str):
        begin, end = f"on_{mode}_batch_begin", f"on_{mode}_batch_end"
        self._begin, self._end = getattr(callbacks, begin), getattr(callbacks, end)
        self._waiting: deque[tuple[Any, Callable[[], None]]] = deque()
        self.begins = self.ends = True
        self.halts = self._late = False
        self.obstacle: str | None = f"{type(callbacks).__name__} is no list of Keras's own"
        if type(callbacks) is not keras.callbacks.CallbackList:
            return
        # Keras's own list hands the hooks that end a batch to threads; this is what they call.
        self._end = getattr(callbacks, f"_{end}", self._end)
        begin_listeners = [one for one in callbacks.callbacks if _listens(one, begin)]
        end_listeners = [one for one in callbacks.callbacks if _listens(one, end)]
        self.begins, self.ends = bool(begin_listeners), bool(end_listeners)
        self.halts = mode == "train" and any(map(_stops_at_nan, end_listeners))
        self._late = all(map(_only_reads, end_listeners))
        acting = [
            (one, hook)
            for listeners, hook in ((begin_listeners, begin), (end_listeners, end))
            for one in listeners
            if not _only_reads(one) and not _stops_at_nan(one)
        ]
        self.obstacle = None
        if acting:
            callback, hook = acting[0]
            self.obstacle = f"{type(callback).__name__} has its own {hook}"

    def begin(self, step: int) -> None:
        """A step begins."""
        self._begin(step)

    def end(self, step: int, logs: Any, *, with_begin: bool = False) -> None:
        """A step has ended; with `with_begin` nobody was told yet that it began."""

        def call() -> None:
            if with_begin and self.begins:
                self._begin(step)
            self._end(step, logs)

        self._call(logs, call)

    def replay(self, first: int, stacked: Any, count: int) -> None:
        """Several steps were made in one execution; `stacked` are their logs, in one array each."""

        def call() -> None:
            arrays = tree.map_structure(np.asarray, stacked)
            for i in range(count):
                if self.begins:
                    self._begin(first + i)
                self._end(first + i, tree.map_structure(lambda array, i=i: array[i], arrays))

        self._call(stacked, call)

    def flush(self) -> None:
        """Make all calls that wait."""
        while self._waiting:
            self._waiting.popleft()[1]()

    def _call(self, logs: Any, call: Callable[[], None]) -> None:
        self._waiting.append((logs, call))
        while self._waiting and (
            not self._late or len(self._waiting) > LAG or _is_computed(self._waiting[0][0])
        ):
            self._waiting.popleft()[1]()


def _listens(callback: Any, hook: str) -> bool:
    # The default of the training hook calls the older, unspecific one.
    names = {hook, hook.replace("_train_", "_")}
    return not all(is_default(getattr(callback, name)) for name in names) and not _saves_by_epoch(
        callback, hook
    )


def _is_of(callback: Any, hook: str, owner: Any) -> bool:
    """Whether a hook of a callback is the one that this class of Keras's has."""
    own = getattr(owner, hook)
    return hook not in vars(callback) and getattr(type(callback), hook) is own


def _saves_by_epoch(callback: Any, hook: str) -> bool:
    """Whether it is a saver of Keras's own, which overrides the hook but acts at epochs only."""
    if getattr(callback, "save_freq", None) != "epoch":
        return False
    return any(
        isinstance(callback, saver)
        and all(_is_of(callback, name, saver) for name in (hook, "_should_save_on_batch"))
        and _is_of(callback, hook.replace("_train_", "_"), keras.callbacks.Callback)
        for saver in _SAVERS
    )


def _only_reads(callback: Any) -> bool:
    return bool(getattr(callback, "async_safe", False)) or type(callback) in _READERS


def _stops_at_nan(callback: Any) -> bool:
    owner: Callable[..., Any] = keras.callbacks.TerminateOnNaN
    return isinstance(callback, keras.callbacks.TerminateOnNaN) and all(
        _is_of(callback, hook, owner) for hook in ("on_batch_end", "on_train_batch_end")
    )


def _is_computed(values: Any) -> bool:
    arrays = [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)  # pyright: ignore[reportAttributeAccessIssue]
