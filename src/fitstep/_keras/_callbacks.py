"""The batch hooks of a list of callbacks, called only where one listens, and late where that is safe."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import keras
from keras.src.utils.python_utils import is_default

# How many steps callbacks that only read logs may lag behind.
LAG = 16


class Hook:
    """A batch hook that all callbacks of a list are called through.

    Args:
        call: takes the step, and the logs if the hook has any.
        late: call it, in order, once the logs are computed, so that no step waits for them.
    """

    def __init__(self, call: Callable[..., None], *, late: bool = False):
        self._call = call
        self._late = late
        self._waiting: deque[tuple[Any, ...]] = deque()

    def __call__(self, step: int, *logs: Any) -> None:
        """Call the callbacks, or let them wait for these logs."""
        if not self._late:
            self._call(step, *logs)
            return
        self._waiting.append((step, *logs))
        while self._waiting and (len(self._waiting) > LAG or _is_computed(self._waiting[0])):
            self._call(*self._waiting.popleft())

    def flush(self) -> None:
        """Make all calls that wait."""
        while self._waiting:
            self._call(*self._waiting.popleft())


def batch_hook(callbacks: Any, name: str) -> Hook | None:
    """A batch hook of a callback list, or None where no callback has one of its own.

    Asking the list costs more than a small step does. Keras hands the hooks that end a batch to
    threads if all callbacks leave them alone or are `async_safe`, as its progress bar is taken to
    be; a thread per step would slow a small step down several times, so these are called late.
    """
    if type(callbacks) is not keras.callbacks.CallbackList:
        return Hook(getattr(callbacks, name))
    # The default of the training hook calls the older, unspecific one.
    names = [name, name.replace("_train_", "_")]
    if all(is_default(getattr(each, one)) for each in callbacks.callbacks for one in names):
        return None
    late = _LATE_FLAGS.get(name)
    if late is not None and getattr(callbacks, late, False):
        return Hook(getattr(callbacks, f"_{name}", getattr(callbacks, name)), late=True)
    return Hook(getattr(callbacks, name))


_LATE_FLAGS = {
    "on_train_batch_end": "_async_train",
    "on_test_batch_end": "_async_test",
    "on_predict_batch_end": "_async_predict",
}


def _is_computed(values: Any) -> bool:
    arrays = [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)  # pyright: ignore[reportAttributeAccessIssue]
