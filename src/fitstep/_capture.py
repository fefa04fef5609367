"""The state of a model, taken out of it and put back by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fitstep._errors import StateError
from fitstep._keras import _trainer
from fitstep._state import State
from fitstep.engine._live import Live, alone, copies


def capture(model: Any) -> State:
    """The state of a built model, by name: a copy that later training leaves alone.

    Returns:
        A `State` of arrays on the device.

    Raises:
        StateError: if the model is not built, or a variable has no value.
    """
    _trainer.check_model(model, "capture")
    if not (model.built or model.variables):
        raise StateError(
            f"`fitstep.capture`: the model `{model.name}` is not built, so it has no variables "
            f"yet. Call it on some data, or fit it, first."
        )
    with _variables_of(model) as live:
        return live.state(copies(live.read()))


def restore(model: Any, state: State) -> None:
    """Put a captured state into a model that has the same variables, whatever Keras calls them.

    Nothing is written unless all fits. Metrics that have no variables yet, here or when the state
    was captured, start anew.

    Raises:
        StateError: every name that is missing, unknown, or of another shape or dtype.
    """
    _trainer.check_model(model, "restore")
    if not isinstance(state, State):
        raise TypeError(
            f"`fitstep.restore` takes a state that `fitstep.capture` returned. "
            f"Received: {state!r:.80} of type {type(state).__name__}."
        )
    with _variables_of(model) as live:
        live.restore(state)


@contextmanager
def _variables_of(model: Any) -> Iterator[Live]:
    """The variables, the optimizer's included, which no other thread writes to meanwhile."""
    with alone(model):
        _trainer.build_optimizer(model)
        _trainer.build_optimizer_without_call(model)
        live = Live(model, "train")
        live.relist()
        yield live
