"""Signals are held while arrays are out, delivered after, and never swallowed."""

import signal
import threading
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.utils.python_utils import pythonify_logs

import fitstep as fs
from fitstep.engine._signals import holding, uninterrupted


def _interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_until_the_release():
    """Nothing is raised while held; the interrupt comes with the release."""
    reached = []
    with pytest.raises(KeyboardInterrupt), holding() as hold:
        hold.held = True
        _interrupt()
        reached.append("after the signal")
        hold.release()
        reached.append("after the release")
    assert reached == ["after the signal"]


def test_an_interrupt_outside_a_hold_comes_at_once():
    """Without a hold the handler runs as it would without fitstep."""
    reached = []
    with pytest.raises(KeyboardInterrupt), holding():
        _interrupt()
        reached.append("after the signal")
    assert reached == []


def test_the_second_interrupt_gets_through_what_python_code_holds_up():
    """A step whose Python code never ends can be stopped by a second Ctrl-C."""
    reached = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        _interrupt()
        reached.append("first")
        _interrupt()
        reached.append("second")
    assert reached == ["first"]


def test_the_users_handler_is_called_and_restored():
    """A handler of the user's own runs once for each signal and is back in place afterwards."""
    seen = []

    def handler(number, frame):
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with holding() as hold:
            hold.held = True
            _interrupt()
            assert seen == []
            hold.release()
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_during_a_run_stays():
    """A handler that a callback installs is held too, and left in place at the end."""
    seen = []
    before = signal.getsignal(signal.SIGINT)

    def handler(number, frame):
        seen.append(number)

    try:
        with holding() as hold:
            signal.signal(signal.SIGINT, handler)
            hold.install()
            hold.held = True
            _interrupt()
            assert seen == []
            hold.release()
            assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_swallowed_by_a_library_is_raised_again():
    """Keras converts logs under a bare `except`, which must not eat a Ctrl-C."""

    class Interrupting:
        def __float__(self):
            _interrupt()
            return 0.0

    reached = []
    with pytest.raises(KeyboardInterrupt), holding() as hold:
        pythonify_logs({"loss": Interrupting()})
        reached.append("Keras went on")
        hold.install()
        reached.append("the next step began")
    assert reached == ["Keras went on"]


def test_an_interrupt_that_the_user_catches_stays_caught():
    """What the user's own code catches is the user's decision."""
    with holding() as hold:
        with pytest.raises(KeyboardInterrupt):
            _interrupt()
        hold.install()


def test_nested_holds_deliver_through_each_other():
    """A run within a run's callback hands the interrupt to the user's handler."""
    with pytest.raises(KeyboardInterrupt), holding(), holding() as inner:
        inner.held = True
        _interrupt()
        inner.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_chains_to_the_one_before_it_works():
    """A callback's handler may call what it replaced, and put that back: the original returns."""
    seen = []

    with holding() as hold:
        old: Any = signal.getsignal(signal.SIGINT)

        def mine(number, frame):
            seen.append(number)
            old(number, frame)

        signal.signal(signal.SIGINT, mine)
        hold.install()
        with pytest.raises(KeyboardInterrupt):
            _interrupt()
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, old)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_any_signal_with_a_handler_is_held():
    """Not only Ctrl-C: a scheduler's SIGUSR1 waits as well."""

    def handler(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, handler)
    reached = []
    try:
        with pytest.raises(TimeoutError), holding() as hold:
            hold.held = True
            signal.raise_signal(signal.SIGUSR1)
            reached.append("held")
            hold.release()
            reached.append("released")
        assert reached == ["held"]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("end", ["close", "garbage"])
def test_a_loop_that_ends_in_another_thread_leaves_ctrl_c_alive(end):
    """Only the main thread may set handlers; the signal is handed on, and a later run tidies up."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before = signal.getsignal(signal.SIGINT)
    loops = [fs.steps(model, (np.ones((8, 2)), np.ones((8, 1))), batch_size=4)]
    next(loops[0])

    def finish():
        if end == "close":
            loops[0].close()
        loops.clear()

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    fs.fit(model, np.ones((8, 2)), np.ones((8, 1)), verbose=0)
    assert signal.getsignal(signal.SIGINT) is before
