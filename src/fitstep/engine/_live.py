"""The model's variables and the arrays of a run: kept the same, and never lost.

Before a step the arrays are read from the variables, and right after it the new ones are written
back, so every handle reads true values between steps and every write takes effect.
"""

import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fitstep._errors import StateError
from fitstep._keras import _data, _devices, _names, _trainer, _values
from fitstep._keras._values import Cell
from fitstep._state import ITERATED, PARTS, Layout, Naming, State
from fitstep.engine._signals import uninterrupted


class Record:
    """What outlives a run: the count of steps, the seed, the programs. Dies with the model."""

    def __init__(self) -> None:
        self.step = Cell(jnp.zeros((), "int32"))
        self.seed = Cell(jnp.asarray(np.random.SeedSequence().generate_state(1)[0], "uint32"))
        self._global_seed: int | None = None
        self.slots: dict[str, Any] = {}
        self.programs: dict[Any, Any] = {}
        self.fingerprint: Any = None
        self.changed_by_traces: set[Any] = set()
        # Whether a step was traced after a callback had changed the model in the same run.
        self.is_mixed = False
        self.warned: set[str] = set()
        # For people to read: what was compiled, why programs went stale, how steps were run.
        self.compilations: list[Any] = []
        self.compiled_for: dict[str, list[Any]] = {}
        self.stale: dict[str, str] = {}
        self.choices: dict[str, Any] = {}
        # The runs that are under way, the innermost last.
        self.running: list[Live] = []
        # One thread at a time builds, traces or steps; held by a thread that runs a step within
        # another's trace, too, so it may be taken twice.
        self.lock = threading.RLock()

    def take_global_seed(self) -> None:
        """Take over a seed that was given to Keras since the last run."""
        seed = _data.global_seed()
        if seed != self._global_seed and seed is not None:
            self._global_seed = seed
            self.seed.array = jnp.asarray(np.uint32(seed % 2**32))


# By id, since a model may define equality; an entry goes when its model goes.
_records: dict[int, tuple[Any, Record]] = {}
_records_lock = threading.RLock()  # the collector may forget a model while one is looked up


def record_of(model: Any) -> Record:
    """The record of a model; nothing is written to the model itself."""
    with _records_lock:
        entry = _records.get(id(model))
        if entry is None or entry[0]() is not model:
            # In C, without a line of Python, in which a Ctrl-C would be dropped.
            forget = functools.partial(_records.pop, id(model))
            entry = _records[id(model)] = (weakref.ref(model, forget), Record())
        return entry[1]


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """While a model is built or written to, no signal and no other thread's step comes between."""
    with record_of(model).lock, uninterrupted():
        yield


class Wiring(NamedTuple):
    """Where each part of the state stands among the variables, each of which is there once."""

    variables: tuple[Any, ...]
    places: dict[str, tuple[int, ...]]
    flags: list[bool]
    signature: tuple[Any, ...]


def wiring(model: Any, mode: str, cells: tuple[Cell, Cell]) -> Wiring:
    """The variables that a step of this mode is about; the seed and the step count stand last."""
    listed = _trainer.parts(model)._asdict()
    place: dict[int, int] = {}
    variables: list[Any] = []
    places = {}
    for part in PARTS:
        if part not in ITERATED[mode]:
            places[part] = ()
            continue
        for variable in listed[part]:
            if id(variable) not in place:
                place[id(variable)] = len(variables)
                variables.append(variable)
        places[part] = tuple(place[id(variable)] for variable in listed[part])
    variables += cells
    flags = _values.trainable_flags(variables)
    signature = (tuple(places.values()), tuple(flags), _values.kinds(variables[:-2]))
    return Wiring(tuple(variables), places, flags, signature)


class Snapshot(NamedTuple):
    """Arrays that no program was given, to go back to."""

    variables: tuple[Any, ...]
    arrays: list[Any]


@jax.jit
def _device_copies(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    # Outputs of one program never share a buffer with its inputs.
    return tuple(jnp.copy(array) for array in arrays)


class Live:
    """The variables of one run of one mode, and what the engine last wrote to them.

    The variables are looked up by `relist`, which each epoch begins with.
    """

    def __init__(self, model: Any, mode: str):
        self.model = model
        self.mode = mode
        self.record = record_of(model)
        self.record.take_global_seed()
        self.snapshot: Snapshot | None = None
        self.updates = 0
        self.wiring = Wiring((), dict.fromkeys(PARTS, ()), [], ())
        self.last: list[Any] = []
        self.owns_metrics = False
        self.waits = False  # for the caller's own loop to ask for the next step
        self.devices = _devices.Devices()
        self.is_elsewhere = False
        self._names: list[str] | None = None

    def given_up(self) -> list[int]:
        """What a program may overwrite: in training everything, in testing the metrics."""
        if self.mode == "train":
            return list(range(len(self.wiring.variables)))
        return sorted(set(self.wiring.places["metrics"]))

    def relist(self) -> None:
        """Look up the model's variables anew: layers, flags or the optimizer may have changed."""
        cells = (self.record.seed, self.record.step)
        kept = dict(zip(map(id, self.wiring.variables), self.last, strict=True))
        self.wiring = wiring(self.model, self.mode, cells)
        # What the engine wrote stays known for its own; what others assign is theirs.
        self.last = [kept.get(id(variable)) for variable in self.wiring.variables]
        self.owns_metrics = False
        self._names = None

    def place(self, *, where_it_is: bool = False) -> None:
        """Find the devices of the run, before anything of it is traced.

        Args:
            where_it_is: run a model that is not on the distribution's devices on its own.

        Raises:
            StateError: names a variable that is not on the devices of Keras's distribution.
        """
        variables = self.wiring.variables[:-2]
        arrays = _values.read(variables)
        devices, elsewhere = _devices.found(arrays)
        self.is_elsewhere = bool(elsewhere) and where_it_is
        if self.is_elsewhere:
            devices = _devices.built_on(arrays)
        elif elsewhere:
            first, weights = elsewhere[0], self.wiring.places
            raise StateError(
                devices.refusal(
                    self.names()[first],
                    arrays[first],
                    more=len(elsewhere) - 1,
                    is_weight=first in {*weights["trainable"], *weights["non_trainable"]},
                )
            )
        self.devices = devices
        # The seed and the count of steps are the engine's own. Without a distribution, what was
        # made after it was unset joins the rest of the model.
        joining = self.wiring.variables[0 if devices.distribution is None else -2 :]
        if devices.mesh is not None or any(map(_devices.is_on_mesh, _values.read(joining))):
            _values.write(joining, [devices.joined(array) for array in _values.read(joining)])

    def names(self) -> list[str]:
        """The name of each variable; looked up only for traces and errors."""
        if self._names is None:
            self._names = _variable_names(self.model, self.wiring)
        return self._names

    def naming(self) -> Naming:
        """The variables of Keras with their names; without the seed and the step count."""
        names, places = self.names()[:-2], self.wiring.places
        layout = Layout(
            *(tuple(names[i] for i in places[part]) for part in PARTS), iterated=ITERATED[self.mode]
        )
        return Naming(self.wiring.variables[:-2], names, places, layout)

    def read(self) -> list[Any]:
        """The arrays that the variables hold now, fit to be handed to a program.

        Costs one attribute read and one identity check a variable where nobody has assigned.
        """
        if _values.trainable_flags(self.wiring.variables) != self.wiring.flags:
            owned = self.owns_metrics
            self.relist()
            self.owns_metrics = owned
        arrays = _values.read(self.wiring.variables)
        if any(map(operator.is_not, arrays, self.last)):
            arrays = self._take_over(self._recovered(arrays))
        return arrays

    def recover(self) -> None:
        """Put back what a failed loop of Keras's own within a callback left empty."""
        arrays = _values.read(self.wiring.variables)
        if any(map(_is_gone, arrays)):
            _values.write(self.wiring.variables, self._recovered(arrays))

    def _recovered(self, arrays: list[Any]) -> list[Any]:
        gone = [i for i, array in enumerate(arrays) if _is_gone(array)]
        if not gone:
            return arrays
        nested = _trainer.arrays_of_nested(self.model)
        for i in gone:
            found = (nested.get(id(self.wiring.variables[i])), self.last[i])
            arrays[i] = next((array for array in found if not _is_gone(array)), arrays[i])
        return arrays

    def _take_over(self, arrays: list[Any]) -> list[Any]:
        """Accept what others assigned since the last step, made fit for a program."""
        metrics = set(self.wiring.places["metrics"]) if self.owns_metrics else set()
        given_up = set(self.given_up())
        if not self.owns_metrics:  # an epoch begins, for which they were reset
            given_up -= set(self.wiring.places["metrics"])
        seen: set[int] = set()
        for i, (variable, array) in enumerate(zip(self.wiring.variables, arrays, strict=True)):
            # Another thread's evaluation uses the same metrics, and may have given them up.
            if i in metrics and not _is_gone(self.last[i]):
                array = self.last[i]
            if array is not self.last[i]:
                array = self._fit_for_program(i, variable, array)
                if self.devices.mesh is not None and self.last[i] is not None:
                    array = _devices.like(array, self.last[i])
                # In the middle of a run the next step may be given the array itself: the one
                # that somebody has assigned stays theirs.
                if i in given_up and self.last[i] is not None:
                    array = jnp.copy(array)
            if id(array) in seen:
                array = jnp.copy(array)
            seen.add(id(array))
            arrays[i] = array
        _values.write(self.wiring.variables, arrays)
        self.last = list(arrays)
        return arrays

    def _fit_for_program(self, i: int, variable: Any, array: Any) -> Any:
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            if array.is_deleted():
                raise StateError(
                    f"The array of `{self.names()[i]}` was deleted by something outside fitstep, "
                    f"such as a program that it was donated to. Assign a value to the variable."
                )
            if array.weak_type:
                # A weak dtype would be another program.
                return jax.lax.convert_element_type(array, array.dtype)
            return array
        if array is None or isinstance(array, Tracer):
            raise StateError(
                f"`{self.names()[i]}` has no value: it was "
                f"{'never initialised' if array is None else 'left behind by a traced function'}. "
                f"Build the model first, or assign a value."
            )
        return jnp.array(array, variable.dtype)

    def changed_metrics(self) -> bool:
        """Whether somebody wrote to the metrics that belong to the engine now."""
        if not self.owns_metrics:
            return False
        places = self.wiring.places["metrics"]
        arrays = _values.read([self.wiring.variables[i] for i in places])
        return any(array is not self.last[i] for array, i in zip(arrays, places, strict=True))

    def write(self, arrays: Sequence[Any], steps: int = 1) -> None:
        """Write what steps returned back to the variables."""
        _values.write(self.wiring.variables, arrays)
        self.last = list(arrays)
        self.owns_metrics = True
        self.updates += steps

    def write_back(self) -> None:
        """Let the metrics read what the steps made of them, whatever was written meanwhile."""
        with self.record.lock:  # it writes all variables, which another thread's step may give up
            if self.changed_metrics():
                self.read()

    def end_epoch(self) -> None:
        """Put the epoch's own metrics in place for the last time; a validation may have them."""
        self.write_back()
        self.owns_metrics = False

    def keep(self, arrays: list[Any]) -> None:
        """Keep these arrays as the snapshot: they are whole, and no program will be given them."""
        jax.block_until_ready(arrays)
        self.snapshot = Snapshot(self.wiring.variables, arrays)
        self.updates = 0

    def settle(self) -> str | None:
        """After a failure, make sure that every variable holds a whole array.

        Returns:
            What was taken back, in words, if the snapshot had to be used.
        """
        variables = self.wiring.variables
        _values.unbound(variables)
        arrays = self._recovered(_values.read(variables))
        for i, array in enumerate(arrays):
            if not _is_whole(array) and _is_whole(self.last[i]):
                arrays[i] = self.last[i]
        broken = {i for i, array in enumerate(arrays) if not _is_whole(array)}
        if not broken:
            _values.write(variables, arrays)
            return None
        if self.snapshot is None:
            return "the step failed while it ran and no snapshot was kept: assign new weights"
        kept = dict(zip(map(id, self.snapshot.variables), self.snapshot.arrays, strict=True))
        if broken <= set(self.wiring.places["metrics"]):
            # Such as after an `evaluate` of Keras's own that failed within a callback.
            for i in broken:
                arrays[i] = kept.get(id(variables[i]))
            _values.write(variables, arrays)
            return None
        _values.write(self.snapshot.variables, self.snapshot.arrays)
        self.last = [None] * len(variables)
        return (
            f"the step failed while it ran, after its inputs were given up; weights, optimizer "
            f"and metrics are back at the last snapshot, {self.updates} update(s) were taken back"
        )

    def restore(self, state: State) -> None:
        """Write a state into the variables, if all of it fits."""
        own_arrays = self.read()
        own, wrong, absent = self.state(own_arrays), [], []
        for part in PARTS:
            mine, given = getattr(own, part), getattr(state, part)
            missing = [name for name in mine if name not in given]
            unknown = [name for name in given if name not in mine]
            if part == "metrics":
                # Metrics get their variables from the first batch, and start anew in each epoch.
                absent, missing = missing, []
                unknown = [] if _trainer.has_unbuilt_metrics(self.model) else unknown
            wrong += [f"missing {part} `{name}`" for name in missing]
            wrong += [f"unknown {part} `{name}`" for name in unknown]
            wrong += [
                f"{part} `{name}`: expected {mine[name].dtype}{list(mine[name].shape)}, received "
                f"{given[name].dtype}{list(given[name].shape)}"
                for name in mine
                if name in given
                and (mine[name].shape, mine[name].dtype) != (given[name].shape, given[name].dtype)
            ]
        if wrong:
            raise StateError("The state does not fit the model: " + "; ".join(wrong) + ".")
        if absent:
            self.model.reset_metrics()
            own_arrays = self.read()
        arrays = list(own_arrays)
        for part in PARTS:
            values = getattr(state, part)
            for name, i in zip(own.layout.names(part), self.wiring.places[part], strict=True):
                if name in values:
                    arrays[i] = _devices.like(values[name], own_arrays[i])
        arrays[-2] = _devices.like(jnp.asarray(state.seed, "uint32"), own_arrays[-2])
        arrays[-1] = _devices.like(jnp.asarray(state.step, "int32"), own_arrays[-1])
        fresh = copies(arrays)
        _values.write(self.wiring.variables, fresh)
        self.record.slots = dict(state.slots)

    def state(self, arrays: Sequence[Any]) -> State:
        """The arrays as a state."""
        seed, step = arrays[-2:]
        return self.naming().state(arrays, step, seed, dict(self.record.slots))


def check_devices(model: Any) -> None:
    """Before anything is built on it: see that a model is on the distribution's devices.

    Raises:
        StateError: names a variable that is not.
    """
    if _devices.is_set():
        live = Live(model, "train")
        live.relist()
        live.place()


def copies(arrays: Sequence[Any]) -> list[Any]:
    """Copies on the device, by one program for all of them."""
    return list(_device_copies(tuple(arrays)))


def _is_gone(array: Any) -> bool:
    if array is None or isinstance(array, Tracer):
        return True
    return isinstance(array, jax.Array) and array.is_deleted()


def _is_whole(array: Any) -> bool:
    if _is_gone(array) or not isinstance(array, jax.Array):
        return False
    try:
        array.block_until_ready()
    except Exception:  # noqa: BLE001 - a failed program shows in its outputs, whatever the reason was
        return False
    return True


def _variable_names(model: Any, wiring: Wiring) -> list[str]:
    owners = _names.model_names(model)
    names = dict(owners)
    if optimizer := getattr(model, "optimizer", None):
        names = _names.optimizer_names(optimizer, owners) | names
    names = _names.metric_names(model) | names
    unnamed = itertools.count()
    keras_variables = wiring.variables[:-2]
    found = [names.get(id(v)) or f"unnamed/{next(unnamed)}" for v in keras_variables]
    return [*found, "seed", "step"]
