"""Hold signals back while the model's arrays are out of its variables.

Python runs a signal's handler between any two bytecodes of the main thread, also between the
return of the compiled step and the store of its result, where an exception would lose the model.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The signals whose handlers commonly raise: Ctrl-C, termination, alarms (timeouts of tests).
_WATCHED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
)


class Hold:
    """Defers the user's signal handlers while `held` is true."""

    def __init__(self) -> None:
        self.held = False
        self._pending: list[tuple[int, FrameType | None]] = []
        self._users: dict[int, Callable[..., Any]] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler that stands in for the user's."""
        if self.held:
            self._pending.append((number, frame))
        else:
            self._users[number](number, frame)

    def install(self) -> None:
        """Stand in front of the user's handlers; also of one installed since the last call."""
        for number in _WATCHED:
            handler = signal.getsignal(number)
            if handler is not self and callable(handler):
                self._users[number] = handler
                signal.signal(number, self)

    def release(self) -> None:
        """Stop holding, and deliver what came in the meantime."""
        self.held = False
        while self._pending and not self.held:
            number, frame = self._pending.pop(0)
            self._users[number](number, frame)

    def uninstall(self) -> None:
        """Put the user's handlers back, where nobody else has put one."""
        for number, handler in self._users.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)


class NoHold:
    """Off the main thread no signal handler runs, so there is nothing to hold."""

    held = False

    def install(self) -> None: ...

    def release(self) -> None: ...

    def uninstall(self) -> None: ...


@contextmanager
def holding() -> Iterator[Hold | NoHold]:
    """A hold for the duration of a run; restores the user's handlers at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield NoHold()
        return
    hold = Hold()
    try:
        hold.install()
        yield hold
    finally:
        hold.held = True
        hold.uninstall()
        hold.release()
