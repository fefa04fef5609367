"""The model's own step as a pure function of arrays.

A step in Keras's stock contract, the model's or its class's own, is run in a scope in which the
model's variables stand for the arrays it is given. What it returns is checked and put together
with what Keras code updated by itself.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from fitstep._errors import StateError
from fitstep._keras import _trainer, _values
from fitstep._leaks import Leaks
from fitstep._state import METHODS, PARTS, State, Wires, check_logs, check_result, merge


def run(
    model: Any, mode: str, wires: Wires, state: State, arrays: Sequence[Any], batch: Any
) -> tuple[Any, list[Any]]:
    """One step.

    Args:
        arrays: one for each variable; `state` is made of them.

    Returns:
        The logs as a flat dict (in prediction the outputs), and the new array of each variable.

    Raises:
        StateError: for a result that does not fit, named by part and variable.
    """
    method = METHODS[mode]
    with contextlib.ExitStack() as stack:
        leaks = Leaks(model)
        scope = stack.enter_context(_values.bound(wires.variables, arrays, wires.names))
        given = [scope.get_current_value(variable) for variable in wires.variables]
        trainable = [wires.variables[i] for i in wires.places["trainable"]]
        made = stack.enter_context(
            _trainer.watched_updates(model, trainable, wires.layout.trainable)
        )
        try:
            returned = getattr(model, method)(state, batch)
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(
                f"fitstep: a value computed in an earlier trace was used in `{method}`. Something "
                f"outside the model keeps it, e.g. a list or a global variable."
            )
            raise
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            if scope.reads:
                error.add_note(
                    f"fitstep: `{method}` read {', '.join(sorted(scope.reads))} through a handle. "
                    f"While a step is traced such a value stands for those of every later step. "
                    f"Compute with it as an array (`keras.ops`, `jax.numpy`)."
                )
            raise
        except ValueError as error:
            if "unpack" in str(error) and len(batch) == 3:
                error.add_note(
                    f"fitstep: `{method}` gets data in three parts here, (x, y, sample_weight). "
                    f"Unpack it with `keras.utils.unpack_x_y_sample_weight(data)`."
                )
            raise
        result, new_state = check_result(returned, method)
        result = check_logs(result, method) if mode != "predict" else result
        if mode == "predict":
            new_state = _predicted_state(state, new_state)
        after = merge(state, new_state, method, made)
        updates = [scope.get_current_value(variable) for variable in wires.variables]
    merged = _with_updates(wires, arrays, given, updates, after, method)
    if kept := leaks.take_away():
        raise StateError(
            f"`{method}` stored a traced value in `{'`, `'.join(kept)}`. It has no value once the "
            f"step is compiled. Return it in the logs, keep it in a variable of the model, or use "
            f"a local name."
        )
    return result, merged


def _predicted_state(state: State, returned: Any) -> Any:
    """`predict_step` may return only the non-trainable part."""
    if isinstance(returned, State):
        return returned
    pair = isinstance(returned, tuple | list) and len(returned) == 2
    if pair and all(isinstance(part, tuple | list) for part in returned):
        return returned
    return (state.part("trainable"), returned)


def _with_updates(
    wires: Wires,
    arrays: Sequence[Any],
    given: Sequence[Any],
    updates: Sequence[Any],
    after: State,
    method: str,
) -> list[Any]:
    """What the step returned for each variable, or else what Keras code assigned to it."""
    merged = list(arrays)
    for part in PARTS:
        returned = getattr(after, part)
        for name, i in zip(wires.layout.names(part), wires.places[part], strict=True):
            merged[i] = returned[name]
    for i, (old, new) in enumerate(zip(given, updates, strict=True)):
        if new is old or merged[i] is new:
            continue
        if merged[i] is not arrays[i]:
            raise StateError(
                f"`{method}` assigned `{wires.names[i]}` and returned another value for it. Do "
                f"one of the two."
            )
        merged[i] = new
    return merged
