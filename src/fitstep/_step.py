"""The model's own step as a pure function of arrays.

A step in Keras's stock contract, the model's or its class's own, is run in a scope in which the
model's variables stand for the arrays it is given. What it returns is checked and put together
with what Keras code updated by itself.
"""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax

from fitstep._errors import StateError
from fitstep._keras import _trainer, _values
from fitstep._leaks import Leaks
from fitstep._returned import check_logs, check_result, merge
from fitstep._state import METHODS, PARTS, Naming, State

# What JAX says of two trees that differ, in `jax.tree.map`, `scan` and the like.
_TREE_WORDS = ("pytree", "tree structure", "node type", "Expected tuple", "tuple/list")


def run(
    model: Any, mode: str, naming: Naming, state: State, arrays: Sequence[Any], batch: Any
) -> tuple[Any, list[Any], set[int]]:
    """One step.

    Args:
        arrays: one for each variable; `state` is made of them.

    Returns:
        The logs as a flat dict (in prediction the outputs), the new array of each variable, and
        the places of those that were returned by their position, not by name or assignment.

    Raises:
        StateError: for a result that does not fit, named by part and variable.
    """
    method = METHODS[mode]
    with contextlib.ExitStack() as stack:
        leaks = stack.enter_context(Leaks(model))
        scope = stack.enter_context(_values.bound(naming.variables, arrays, naming.names))
        given = [scope.get_current_value(variable) for variable in naming.variables]
        trainable = [naming.variables[i] for i in naming.places["trainable"]]
        made = stack.enter_context(
            _trainer.watched_updates(model, trainable, naming.layout.trainable)
        )
        _check_contract(model, method, state, batch)
        try:
            returned = getattr(model, method)(state, batch)
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(
                f"fitstep: a value computed in an earlier trace was used in `{method}`. Something "
                f"outside the model keeps it, e.g. a list or a global variable."
            )
            raise
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            read = f"`{method}` read {', '.join(sorted(scope.reads))} through a handle. "
            error.add_note(
                f"fitstep: {read if scope.reads else ''}While a step is traced, a value in it stands "
                f"for those of every later step. Compute with it as an array (`jnp.where`, "
                f"`keras.ops`), return it in the logs, or compile with `run_eagerly=True` to look "
                f"into a step."
            )
            raise
        except (TypeError, ValueError) as error:
            _trainer.note_missing_targets(model, batch, error)
            if "State" in str(error) and any(word in str(error) for word in _TREE_WORDS):
                error.add_note(
                    f"fitstep: the state that `{method}` gets is a `fitstep.State`, another pytree "
                    f"than a tuple. Where JAX compares the two, give it `tuple(state)`, which is "
                    f"what Keras passes."
                )
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
        # What Keras's own step returns is in its place; layers may exchange what they like.
        own = not _trainer.is_stock(model, method)
        after = merge(state, new_state, method, made, exchanges=not own)
        updates = [scope.get_current_value(variable) for variable in naming.variables]
    merged = _with_updates(naming, arrays, given, updates, after, method)
    if kept := leaks.take_away():
        raise StateError(
            f"`{method}` stored a traced value in `{'`, `'.join(kept)}`. It has no value once the "
            f"step is compiled. Return it in the logs, keep it in a variable of the model, or use "
            f"a local name."
        )
    assigned = {i for i, old in enumerate(given) if updates[i] is not old}
    by_position = set() if isinstance(new_state, State) else set(range(len(merged))) - assigned
    return result, merged, by_position


def _check_contract(model: Any, method: str, state: State, batch: Any) -> None:
    """Recognise the step of Keras's other backends, `train_step(self, data)`.

    Raises:
        StateError: if the method does not take a state and a batch.
    """
    function = getattr(model, method)
    try:
        inspect.signature(function).bind(state, batch)
    except TypeError:
        result = "(outputs, state)" if method == "predict_step" else "(logs, state)"
        raise StateError(
            f"`{type(model).__name__}.{method}` takes `{inspect.signature(function)}`. On JAX a "
            f"step takes the state, too: write `def {method}(self, state, data)` and return "
            f"`{result}`."
        ) from None


def _predicted_state(state: State, returned: Any) -> Any:
    """`predict_step` may return only the non-trainable part."""
    if isinstance(returned, State):
        return returned
    pair = isinstance(returned, tuple | list) and len(returned) == 2
    if pair and all(isinstance(part, tuple | list) for part in returned):
        return returned
    return (state.part("trainable"), returned)


def _with_updates(
    naming: Naming,
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
        for name, i in zip(naming.layout.names(part), naming.places[part], strict=True):
            merged[i] = returned[name]
    for i, (old, new) in enumerate(zip(given, updates, strict=True)):
        if new is old or merged[i] is new:
            continue
        if merged[i] is not arrays[i]:
            raise StateError(
                f"`{method}` assigned `{naming.names[i]}` and returned another value for it. Do "
                f"one of the two."
            )
        merged[i] = new
    return merged
