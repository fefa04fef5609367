"""Run one step after another without ever losing the model."""

from typing import Any

import jax
import keras
import numpy as np

from fitstep._keras import _data, _trainer
from fitstep._returned import check_scalars
from fitstep._state import METHODS
from fitstep.engine import _live
from fitstep.engine._fingerprint import differences, fingerprint
from fitstep.engine._live import Live, Record
from fitstep.engine._means import Means
from fitstep.engine._program import Program, Step, Trace, compile_step, rows_of, run_eagerly


class Runner:
    """Runs the steps of one run of one mode.

    Args:
        step: the pure step of the model.
        live: the variables of the run.
        hold: holds signals back while arrays are out of the variables.
        donate: give the programs the arrays themselves, so that they are updated in place.
        snapshot: keep the arrays of each epoch's start, to go back to when a step fails.
    """

    def __init__(
        self, step: Step, live: Live, hold: Any, *, donate: bool = True, snapshot: bool = True
    ):
        self._step = step
        self.live = live
        self.hold = hold
        self.compiled = _trainer.is_compiled_by_xla(live.model) and not _setting("jax_disable_jit")
        # JAX then looks at every result and raises: nothing may be given up, so that the state
        # before the step is still there.
        self.checked = bool(_setting("jax_debug_nans") or _setting("jax_debug_infs"))
        self.donate = donate and self.compiled and not self.checked
        self.snapshot = snapshot
        self._wiring: Any = None
        self._programs: dict[Any, Program] = {}
        self._own_programs: dict[Any, Any] = {}
        self.means = Means()
        self._examined = False
        self._extras_of_trace: set[str] | None = None
        self._keep_next = True
        # Within a run its programs stay; a nested run must not drop them.
        if not live.record.running:
            _drop_stale(live.record, fingerprint(live.model))

    def begin_epoch(self) -> None:
        """Look up the variables and start averages anew; the next inputs become the snapshot."""
        with self.live.record.lock:
            self.live.recover()
            self.live.relist()
            self.live.read()
            self.live.owns_metrics = True
        self.means.clear()
        # A run's first step is given copies in any case: arrays that were assigned before it may
        # belong to somebody else.
        self._keep_next = self._keep_next or self.snapshot

    def step(self, batch: Any) -> Any:
        """One step on one batch, whatever other threads do with the model.

        Returns:
            Its logs as device arrays; in prediction its outputs.
        """
        with self.live.record.lock:
            return self._execute(batch)

    def _execute(self, batch: Any) -> Any:
        live, hold = self.live, self.hold
        hold.install()
        arrays = live.read()
        if not self.compiled:
            return self._step_eagerly(arrays, batch)
        program, leaves = self._program(arrays, batch)
        self.means.use(program.extras, program.extras)
        given, kept = program.give_up(arrays), program.keep(arrays)
        careful = not (self.donate and program.proven)
        if self.donate and (self._keep_next or not program.proven):
            # The program gets copies; what it could destroy stays as the snapshot.
            live.keep(list(arrays))
            self._keep_next = False
            given = tuple(_live.copies(given))
        hold.held = True
        try:
            new, result, means = program.call(given, kept, self.means.running, leaves)
            if careful:
                jax.block_until_ready((new, result))
            if len(new) == len(arrays):
                arrays = list(new)
            else:
                for i, array in zip(program.written, new, strict=True):
                    arrays[i] = array
            live.write(arrays)
            self.means.running = means
            program.proven = True
            if not self.snapshot:
                live.snapshot = None
        finally:
            hold.release()
        return result

    def _step_eagerly(self, arrays: list[Any], batch: Any) -> Any:
        live = self.live
        with self.hold.patiently():
            result, new = run_eagerly(self._step, live, arrays, batch)
            live.write(jax.block_until_ready(new))
            if live.mode != "predict" and not _trainer.is_stock(live.model, METHODS[live.mode]):
                self._average_eagerly(result, arrays, batch)
        return result

    def _average_eagerly(self, logs: dict[str, Any], arrays: list[Any], batch: Any) -> None:
        """Average what is no metric, as a program would do it."""
        results = jax.tree.leaves(self.live.model.get_metrics_result())
        extras = {name for name, value in logs.items() if not _equals_one(value, results)}
        has_weights = len(batch) == 3 if isinstance(batch, tuple) else False
        if (extras or has_weights) and not self._examined:
            self._examined, self._extras_of_trace = True, self._traced_extras(arrays, batch)
        # What cannot be traced, since it wants concrete values, is judged by its values alone.
        if self._extras_of_trace is not None:
            extras &= self._extras_of_trace
        check_scalars(logs, extras, METHODS[self.live.mode])
        names = tuple(sorted(name for name in logs if getattr(logs[name], "shape", ()) == ()))
        self.means.use(names, extras)
        self.means.add([logs[name] for name in names], rows_of(batch))

    def _traced_extras(self, arrays: list[Any], batch: Any) -> set[str] | None:
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, batch))
        try:
            trace = Trace(self._step, self.live, arrays, leaves, structure, donate=False)
        except Exception:  # noqa: BLE001 - eager steps may do what no trace can
            return None
        return set(trace.extras())

    def _program(self, arrays: list[Any], batch: Any) -> tuple[Program, tuple[Any, ...]]:
        live = self.live
        if live.wiring is not self._wiring:
            self._wiring = live.wiring
            key = (
                live.mode,
                self.donate,
                self.checked,
                _setting("jax_enable_x64"),
                _setting("jax_default_matmul_precision"),
                keras.distribution.distribution(),
                live.wiring.signature,
            )
            # What JAX compiles itself keeps the model alive, so it must not outlive the run.
            kept = self._own_programs if self.checked else live.record.programs
            self._programs = kept.setdefault(key, {})
        leaves, structure = jax.tree.flatten(batch)
        shapes = (structure, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        program = self._programs.get(shapes)
        if program is None:
            _data.check_numbers(batch)
            before = fingerprint(live.model)
            with self.hold.patiently():
                trace = Trace(self._step, live, arrays, leaves, structure, donate=self.donate)
                program = self._programs[shapes] = compile_step(trace, checked=self.checked)
            # What the trace itself changed, such as a counter of traces, makes nothing stale.
            live.record.changed_by_traces |= differences(before, fingerprint(live.model))
        return program, tuple(leaves)


def _setting(name: str) -> Any:
    """A setting of JAX as it is now, also within its context managers."""
    return getattr(jax.config, name)


def _equals_one(value: Any, results: list[Any]) -> bool:
    return any(np.array_equal(value, result, equal_nan=True) for result in results)


def _drop_stale(record: Record, current: dict[Any, Any]) -> None:
    """Forget the programs of a model whose Python side has changed since the last run."""
    if record.fingerprint is not None and (
        differences(record.fingerprint, current) - record.changed_by_traces
    ):
        record.programs.clear()
        record.changed_by_traces.clear()
    record.fingerprint = current
