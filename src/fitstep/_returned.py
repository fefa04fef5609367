"""The check of what a step returned, leaf by leaf and by name, at trace time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from fitstep._errors import StateError
from fitstep._state import NOTHING, PARTS, State, described


def merge(
    before: State,
    returned: Any,
    method: str,
    made: Mapping[int, str] = NOTHING,
    *,
    exchanges: bool = False,
) -> State:
    """The state after a step, from whatever the step returned for it.

    Args:
        before: the state that the step was given.
        returned: a `State`, or a tuple or list of the parts that `before` yields, each a list or
            tuple of arrays in Keras's order.
        method: the name of the step, for the error.
        made: id of an array -> name of the variable that it was computed for, where that is
            known; so two variables of one shape that were exchanged are found.
        exchanges: let such pass.

    Raises:
        StateError: which part or variable is wrong, what was expected and what came back.
    """
    if isinstance(returned, State):
        if _is_other(returned.step, before.step) or _is_other(returned.seed, before.seed):
            raise StateError(
                f"`{method}` changed `step` or `seed` of the state. Both belong to the engine: "
                f"leave them as they came."
            )
        received = {part: getattr(returned, part) for part in PARTS}
        for part, arrays in received.items():
            _check_names(getattr(before, part), arrays, part, method)
        slots = returned.slots
    else:
        received = _by_name(before, returned, method)
        if not exchanges:
            _check_exchanged(before, received, method, made)
        slots = before.slots
    merged = {
        part: MappingProxyType(
            {
                name: _checked(arrays[name], expected, part, name, method)
                for name, expected in getattr(before, part).items()
            }
        )
        if (arrays := received.get(part)) is not None
        else getattr(before, part)
        for part in PARTS
    }
    return replace(before, **merged, slots=slots)


def _is_other(value: Any, before: Any) -> bool:
    """Whether a number was exchanged; one that was computed, such as by a `where`, is let pass."""
    if value is before or isinstance(value, Tracer):
        return False
    return isinstance(before, Tracer) or not np.array_equal(value, before)


def _by_name(before: State, returned: Any, method: str) -> dict[str, Mapping[str, Any]]:
    wanted = before.layout.iterated
    if not isinstance(returned, tuple | list) or len(returned) != len(wanted):
        got = f"{len(returned)} parts" if isinstance(returned, tuple | list) else _kind(returned)
        raise StateError(
            f"`{method}` must return its state in {len(wanted)} parts "
            f"({', '.join(wanted)}), each a list of arrays. Received: {got}."
        )
    for part, arrays in zip(wanted, returned, strict=True):
        if not isinstance(arrays, tuple | list):
            raise StateError(
                f"`{method}`: the part `{part}` of the returned state must be a list or tuple of "
                f"arrays. Received: {_kind(arrays)}."
            )
    _check_order(before, returned, method)
    for part, arrays in zip(wanted, returned, strict=True):
        names = before.layout.names(part)
        if len(arrays) != len(names):
            raise StateError(
                f"`{method}`: the part `{part}` of the returned state has the wrong length. "
                f"Expected {len(names)} arrays ({_shortened(names)}). Received: {len(arrays)}."
            )
    # Where Keras lists a variable twice, the occurrence that was changed counts.
    received: dict[str, dict[str, Any]] = {}
    for part, arrays in zip(wanted, returned, strict=True):
        old, new = getattr(before, part), received.setdefault(part, {})
        for name, array in zip(before.layout.names(part), arrays, strict=True):
            if name not in new or array is not old[name]:
                new[name] = array
    return dict(received)


def _check_exchanged(
    before: State, received: Mapping[str, Mapping], method: str, made: Mapping[int, str]
) -> None:
    """Find variables that stand in each other's places, which shapes alone cannot tell.

    A copy (a target network) or a shift (a queue) leaves one of them out; an exchange is a ring.
    """
    owners = {
        id(array): (part, name) for part in PARTS for name, array in getattr(before, part).items()
    } | {key: ("trainable", name) for key, name in made.items()}
    owner = {
        (part, name): owners.get(id(array), (part, name))
        for part, arrays in received.items()
        for name, array in arrays.items()
    }
    for start in owner:
        ring = [start]
        while (following := owner.get(ring[-1])) is not None and following not in ring:
            ring.append(following)
        if len(ring) > 1 and following == start:
            (part, name), (other_part, other) = ring[:2]
            raise StateError(
                f"`{method}`: the {part} variable `{name}` and the {other_part} variable `{other}` "
                f"were exchanged in the returned state. Expected: each in the place it came in."
            )


def _check_order(before: State, returned: Sequence[Any], method: str) -> None:
    """Recognise parts in the wrong order, which is clearer than the first wrong leaf."""
    wanted = before.layout.iterated
    expected = [_signature(before.part(part)) for part in wanted]
    received = [_signature(arrays) for arrays in returned]
    if received == expected or sorted(map(str, received)) != sorted(map(str, expected)):
        return
    order = [wanted[expected.index(signature)] for signature in received]
    raise StateError(
        f"`{method}` returned the parts of its state in the wrong order. "
        f"Expected: {', '.join(wanted)}. Received: {', '.join(order)}."
    )


def _signature(arrays: Sequence[Any]) -> list[tuple[Any, str]]:
    return [(getattr(a, "shape", None), str(getattr(a, "dtype", type(a)))) for a in arrays]


def _check_names(expected: Mapping, received: Mapping, part: str, method: str) -> None:
    missing = [name for name in expected if name not in received]
    extra = [name for name in received if name not in expected]
    if missing or extra:
        raise StateError(
            f"`{method}`: the part `{part}` of the returned state has other names. "
            f"Missing: {', '.join(missing) or 'none'}. Unknown: {', '.join(extra) or 'none'}."
        )


def _checked(value: Any, expected: Any, part: str, name: str, method: str) -> Any:
    """`value` as an array like `expected`, whose dtype is strong, or an error that names it."""
    if isinstance(value, keras.KerasTensor | keras.Variable) or (
        not hasattr(value, "dtype") and not isinstance(value, int | float | bool | complex)
    ):
        raise StateError(
            f"`{method}`: {part} variable `{name}` came back as {_kind(value)}. "
            f"Expected an array {described(expected)}."
        )
    if not isinstance(value, jax.Array):
        value = jax.numpy.asarray(value)
    weak = getattr(value, "weak_type", False)
    same_kind = jax.numpy.issubdtype(value.dtype, np.inexact) == jax.numpy.issubdtype(
        expected.dtype, np.inexact
    )
    # A weak dtype is how JAX types a Python number: harmless, but it would be another program.
    if value.shape == expected.shape and weak and same_kind:
        return jax.lax.convert_element_type(value, expected.dtype)
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise StateError(
            f"`{method}`: {part} variable `{name}` came back with another shape or dtype. "
            f"Expected {described(expected)}. Received: {described(value)}."
        )
    return value


def check_logs(logs: Any, method: str) -> dict[str, Any]:
    """The logs of a step as a flat dict of arrays and numbers.

    Nested dicts are flattened, as Keras does with metrics of several values.

    Raises:
        StateError: if the logs are no such dict; names the entry.
    """
    if not isinstance(logs, Mapping):
        raise StateError(
            f"`{method}` must return `(logs, state)` with `logs` a dict of scalars such as "
            f"{{'loss': loss}}. Received for `logs`: {_kind(logs)}."
        )
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            flat.update(check_logs(value, method))
            continue
        value = value.value if hasattr(value, "assign") else value
        is_number = hasattr(value, "shape") or isinstance(value, int | float | bool)
        if not isinstance(name, str) or not is_number:
            raise _bad_log(name, value, method)
        flat[name] = value
    return flat


def check_scalars(logs: Mapping[str, Any], names: Iterable[str], method: str) -> None:
    """Check that these logs, which are to be averaged, are scalars.

    Raises:
        StateError: names the log that is none.
    """
    for name in names:
        if getattr(logs[name], "shape", ()) != ():
            raise _bad_log(name, logs[name], method)


def _bad_log(name: Any, value: Any, method: str) -> StateError:
    return StateError(
        f"`{method}`: the log {name!r} must be a scalar under a string, or the result of a "
        f"metric. Received: {_kind(value)}. Reduce it, e.g. with `keras.ops.mean`."
    )


def check_result(returned: Any, method: str) -> tuple[Any, Any]:
    """The two things a step returns.

    Raises:
        StateError: if it is not a pair.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        first = "outputs" if method == "predict_step" else "logs"
        raise StateError(f"`{method}` must return `({first}, state)`. Received: {_kind(returned)}.")
    return returned[0], returned[1]


def _kind(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {described(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.80} of type {type(value).__name__}"


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", ... {names[-1]}" if len(names) > 4 else "")
