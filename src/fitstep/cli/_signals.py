"""SIGTERM and SIGHUP end a run as Ctrl-C does: with everything saved."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Signals:
    """What ended the run, if a signal did."""

    number: int = signal.SIGINT

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 and the signal's number; 130 for Ctrl-C."""
        return 128 + self.number


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[Signals]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP too, where they have their default effect."""
    signals = Signals()

    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            # A forked worker, which inherits the handler: its parent ends it by this signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signals.number = number
        # Through Ctrl-C's own handler: the engine holds that one back for the moment in which
        # the model's arrays are inside a program, and a raise there would lose the model.
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    replaced = []
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):  # no SIGHUP on Windows
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, interrupt)
                replaced.append(number)
    try:
        yield signals
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
