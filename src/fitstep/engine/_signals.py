"""Hold signals back while the model's arrays are out of its variables.

Python runs a signal's handler between any two bytecodes of the main thread, also between the
return of the compiled step and the store of its result, where an exception would lose the model.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jaxlib
import keras
import numpy as np

import fitstep

# Looked at before every step, for a callback may install a handler; the others at the beginning.
_COMMON = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
)
_ALL = tuple(signal.valid_signals())
_LIBRARIES = tuple(
    f"{Path(module.__file__).parent}{os.sep}"
    for module in (fitstep, jax, jaxlib, keras, np)
    if module.__file__
)


class Front:
    """Stands in front of one handler of the user's, for as long as anybody may call it."""

    def __init__(self, hold: "Hold", handler: Callable[..., Any]):
        self.hold = hold
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.hold.receive(self.handler, number, frame)


def _fronts(handler: Any) -> Iterator[Front]:
    """The fronts of a handler, from the outermost on."""
    while isinstance(handler, Front):
        yield handler
        handler = handler.handler


class Hold:
    """Defers the user's signal handlers while `held` is true.

    Within `patiently` the second signal gets through, so that a step whose Python code never
    ends can be stopped.
    """

    def __init__(self) -> None:
        self.held = False
        self.is_over = False
        self._patient = False
        self._pending: list[tuple[Callable[..., Any], int, FrameType | None]] = []
        self._numbers: set[int] = set()
        self._raised: BaseException | None = None
        self._dropped = False
        self.report_dropped: Callable[..., Any] = sys.unraisablehook

    def receive(self, handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        """A signal came: call the user's handler, now or at the release."""
        if self.held and not (self._patient and self._pending):
            self._pending.append((handler, number, frame))
        else:
            self._pending.clear()
            self._deliver(handler, number, frame)

    def _deliver(self, handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            self._raised = error
            raise

    def raise_swallowed(self) -> None:
        """Raise again what a handler raised, if it got lost on its way: the run went on.

        Keras converts logs in a `try` whose bare `except` catches Ctrl-C as well, and Python
        drops what is raised in a finaliser. What the user's own code caught is the user's
        decision.
        """
        error, self._raised = self._raised, None
        dropped, self._dropped = self._dropped, False
        if error is None:
            return
        trace = error.__traceback__
        caught_in = trace.tb_frame.f_code.co_filename if trace else ""
        if dropped or caught_in.startswith(_LIBRARIES):
            raise error

    def watch_dropped(self, unraisable: Any) -> None:
        """What Python calls for an exception that it drops, in the place of the user's hook."""
        if unraisable.exc_value is self._raised and self._raised is not None:
            self._dropped = True
        else:
            self.report_dropped(unraisable)

    def install(self, numbers: Iterable[int] = _COMMON) -> None:
        """Stand in front of the user's handlers; also of one installed since the last call."""
        if self._raised:
            self.raise_swallowed()
        for number in numbers:
            handler = signal.getsignal(number)
            while isinstance(handler, Front) and handler.hold.is_over:
                handler = handler.handler
                signal.signal(number, handler)
            # Another hold that was installed later may stand in front of this one.
            if callable(handler) and all(front.hold is not self for front in _fronts(handler)):
                signal.signal(number, Front(self, handler))
                self._numbers.add(number)

    def watch(self) -> None:
        """Notice what Python drops, from now until `uninstall`."""
        self.report_dropped, sys.unraisablehook = sys.unraisablehook, self.watch_dropped

    def release(self) -> None:
        """Stop holding, and deliver what came in the meantime."""
        self.held = self._patient = False
        while self._pending:
            self._deliver(*self._pending.pop(0))

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Hold while Python code runs that must not be left half done."""
        self._patient = self.held = True
        try:
            yield
        finally:
            self.release()

    def uninstall(self) -> None:
        """Put the user's handlers back, where nobody else has put one.

        Holds may end in any order, such as those of two `fitstep.steps` at once.
        """
        for number in self._numbers:
            above = None
            for front in _fronts(signal.getsignal(number)):
                if front.hold is not self:
                    above = front
                elif above is not None:
                    above.handler = front.handler
                elif threading.current_thread() is threading.main_thread():
                    signal.signal(number, front.handler)
                else:
                    # A loop of `fitstep.steps` that ends in another thread, by hand or as garbage,
                    # hands signals on from here; the next run takes it away.
                    self.is_over = True
        above, hook = None, sys.unraisablehook
        while isinstance(hold := getattr(hook, "__self__", None), Hold):
            if hold is not self:
                above = hold
            elif above is not None:
                above.report_dropped = self.report_dropped
            else:
                sys.unraisablehook = self.report_dropped
            hook = hold.report_dropped


class NoHold(Hold):
    """Off the main thread no signal handler runs, so there is nothing to hold."""

    def install(self, numbers: Iterable[int] = _COMMON) -> None:
        """Leave the handlers alone: only the main thread may set them."""

    def watch(self) -> None:
        """Leave the hook alone, too."""


@contextmanager
def holding() -> Iterator[Hold]:
    """A hold for the duration of a run; restores the user's handlers at the end."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    hold = Hold() if in_main_thread else NoHold()
    try:
        hold.install(_ALL)
        hold.watch()
        yield hold
        hold.raise_swallowed()
    finally:
        hold.held = True
        try:
            hold.uninstall()
        finally:
            hold.release()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals while something is built that must not be left half done."""
    with holding() as hold, hold.patiently():
        yield
