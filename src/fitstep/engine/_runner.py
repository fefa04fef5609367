"""Run one step after another without ever losing the model."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from fitstep._keras import _trainer
from fitstep._returned import check_scalars
from fitstep._state import METHODS
from fitstep.engine import _live
from fitstep.engine._feed import Chunk, Kind, kind_of
from fitstep.engine._fingerprint import differences, fingerprint
from fitstep.engine._live import Live, Record
from fitstep.engine._means import Means
from fitstep.engine._program import (
    Program,
    Step,
    Trace,
    compile_loop,
    compile_step,
    rows_of,
    run_eagerly,
)

# The rule for how many steps share an execution: 16 have all of the gain, stacks stay small, and
# nobody waits long for a Ctrl-C or a progress bar.
MOST_STEPS = 16
MOST_BYTES = 32 * 2**20
LONGEST = 0.1  # seconds
# Chunks above this size do not pile up while earlier ones run.
SMALL = 2**20
IN_FLIGHT = 3


class Executed(NamedTuple):
    """What came of the steps of a chunk.

    Attributes:
        last: the logs of the last step; in prediction its outputs, unless they are stacked.
        stacked: the logs or outputs of all steps, one behind the other, if they were stacked.
        count: the steps that were made.
    """

    last: Any
    stacked: Any = None
    count: int = 1


class Programs:
    """What is known of, and compiled for, one kind of batch.

    Attributes:
        traced: whether the step was traced for it.
        alone: whether its steps run one at a time, whatever is asked for.
        by_width: the programs by the batches that they take in one execution.
    """

    def __init__(self) -> None:
        self.traced = False
        self.alone = False
        self.by_width: dict[int, Program] = {}


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
        self._programs: dict[Kind, Programs] = {}
        self._own_programs: dict[Any, Any] = {}
        self._traces: dict[Kind, Trace] = {}
        self._flight: deque[Any] = deque(maxlen=IN_FLIGHT)
        self.means = Means()
        self._examined = False
        self._extras_of_trace: set[str] | None = None
        self._keep_next = True
        self.steps = 0  # of this run
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

    def room(self, kind: Kind, wanted: int) -> int:
        """How many batches of a kind to stack for one execution; 1 for one batch at a time.

        Args:
            wanted: more have no use, such as in a short epoch.
        """
        if wanted < 2 or not self.compiled or self.checked:
            return 1
        programs = self._programs_of_kind(kind)
        if not programs.traced:
            with self.live.record.lock:
                programs = self._programs_for(self.live.read(), kind)
        if programs.alone:
            return 1
        most = min(MOST_STEPS, MOST_BYTES // max(kind.nbytes, 1))
        if most < 2:
            return 1
        # Powers of two, and what is there already, so that few programs do.
        width = min(2 ** (min(wanted, most) - 1).bit_length(), most)
        return min((w for w in programs.by_width if width <= w <= most and w > 1), default=width)

    def most(self, kind: Kind, width: int) -> int:
        """How many of the stacked batches to run in one execution, for it not to take long."""
        program = self._programs_of_kind(kind).by_width.get(width)
        if program is None or program.seconds is None:
            return width
        return max(1, min(width, int(LONGEST / max(program.seconds, 1e-9))))

    def execute(self, chunk: Chunk, *, halt: bool = False) -> Executed:
        """The steps of a chunk, whatever other threads do with the model.

        Args:
            halt: end early, after a step whose loss is not finite.
        """
        with self.live.record.lock:
            return self._execute(chunk, halt)

    def _execute(self, chunk: Chunk, halt: bool) -> Executed:
        live, hold = self.live, self.hold
        hold.install()
        arrays = live.read()
        if not self.compiled:
            result = self._step_eagerly(arrays, chunk)
            self.steps += 1
            return Executed(result)
        program = self._program(arrays, chunk)
        self.means.use(program.extras, program.extras)
        self._limit_flight(chunk)
        given, kept = program.give_up(arrays), program.keep(arrays)
        measured = program.runs < 2 and program.width > 1
        careful = not (self.donate and program.runs) or measured
        if self.donate and (self._keep_next or not program.runs):
            # The program gets copies; what it could destroy stays as the snapshot.
            live.keep(list(arrays))
            self._keep_next = False
            given = tuple(_live.copies(given))
        began = time.perf_counter()
        hold.held = True
        try:
            if program.width == 1:
                made, stacked = 1, None
                new, last, means = program.call(given, kept, self.means.running, chunk.leaves)
            else:
                count, flag = np.int32(chunk.count), np.bool_(halt)
                new, last, means, stacked, made = program.call(
                    given, kept, self.means.running, chunk.leaves, count, flag
                )
            if careful:
                jax.block_until_ready((new, last, stacked))
            if len(new) == len(arrays):
                arrays = list(new)
            else:
                for i, array in zip(program.written, new, strict=True):
                    arrays[i] = array
            live.write(arrays, chunk.count)
            self.means.running = means
            program.runs += 1
            if not self.snapshot:
                live.snapshot = None
        finally:
            hold.release()
        if measured:
            seconds = (time.perf_counter() - began) / chunk.count
            program.seconds = min(seconds, program.seconds or seconds)
        self._flight.append(stacked if last is None else last)
        count = int(made) if halt else chunk.count
        self.steps += count
        return Executed(last, stacked, count)

    def _limit_flight(self, chunk: Chunk) -> None:
        """Let few large chunks wait for their execution, each of which holds its memory."""
        flight = self._flight
        if len(flight) == flight.maxlen and chunk.kind.nbytes * chunk.width > SMALL:
            jax.block_until_ready(flight[0])

    def _step_eagerly(self, arrays: list[Any], chunk: Chunk) -> Any:
        live, batch = self.live, jax.tree.unflatten(chunk.kind.structure, chunk.leaves)
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
        kind = kind_of(*jax.tree.flatten(jax.tree.map(np.asarray, batch)))
        try:
            trace = Trace(self._step, self.live, arrays, kind, donate=False)
        except Exception:  # noqa: BLE001 - eager steps may do what no trace can
            return None
        return set(trace.extras())

    def _program(self, arrays: list[Any], chunk: Chunk) -> Program:
        programs = self._programs_for(arrays, chunk.kind)
        program = programs.by_width.get(chunk.width)
        if program is None:
            with self._tracing(), self.hold.patiently():
                trace = self._traces.get(chunk.kind) or self._trace(arrays, chunk.kind)
                if chunk.width == 1:
                    program = compile_step(trace, checked=self.checked)
                else:
                    program = compile_loop(trace, chunk.width)
            programs.by_width[chunk.width] = program
        return program

    def _programs_of_kind(self, kind: Kind) -> Programs:
        live = self.live
        if live.wiring is not self._wiring:
            self._wiring = live.wiring
            self._traces.clear()
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
        return self._programs.setdefault(kind, Programs())

    def _programs_for(self, arrays: list[Any], kind: Kind) -> Programs:
        """The programs of a kind of batch; the first time it is traced, to know what is in it."""
        programs = self._programs_of_kind(kind)
        if not programs.traced:
            with self._tracing(), self.hold.patiently():
                trace = self._trace(arrays, kind)
            programs.traced = True
            on_cpu = jax.default_backend() == "cpu"
            programs.alone = on_cpu and trace.holds_convolution()
        return programs

    def _trace(self, arrays: list[Any], kind: Kind) -> Trace:
        trace = Trace(self._step, self.live, arrays, kind, donate=self.donate)
        self._traces[kind] = trace
        return trace

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        before = fingerprint(self.live.model)
        yield
        # What the trace itself changed, such as a counter of traces, makes nothing stale.
        changed = differences(before, fingerprint(self.live.model))
        self.live.record.changed_by_traces |= changed


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
