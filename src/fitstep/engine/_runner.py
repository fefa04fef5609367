"""Run one step after another without ever losing the model."""

import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from fitstep._errors import DataError, StateError
from fitstep._keras import _devices, _trainer, _values
from fitstep._returned import check_scalars
from fitstep._state import METHODS
from fitstep._warn import warn
from fitstep.engine import _facts, _live
from fitstep.engine._fingerprint import differences, fingerprint
from fitstep.engine._live import Live, Record
from fitstep.engine._means import Means
from fitstep.engine._passes import Chunk, Kind, kind_of
from fitstep.engine._program import Program, checked_step, lower
from fitstep.engine._trace import Step, Traced, rows_of, run_eagerly, trace

# The rule for how many steps share an execution: 16 have all of the gain, stacks stay small, and
# nobody waits long for a Ctrl-C or a progress bar.
MOST_STEPS = 16
MOST_BYTES = 32 * 2**20
LONGEST = 0.1  # seconds
RETIMED = 16  # executions of long steps: timing one waits for it, and nothing is prepared meanwhile
UNTIMED = 2  # steps of an execution before one was timed; a single batch would not be stacked
_USUAL = ("the first", "another batch")
_MODEL_CHANGED = "changed on the model"
_PATIENCE = 3  # changes of the model between steps that are called one by one
_MOST_NAMED = 5  # kinds of batches in a message
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
        alone: why its steps run one at a time, whatever is asked for; None before it is traced.
        nbytes: of a batch, or of what a step makes of it where that is more.
        traced: the step's trace, kept for the programs to come where it does not hold the model.
        by_width: the programs by the batches that they take in one execution.
        is_current: of what was compiled ahead and not used yet: waits for it, and says whether the
            model is still as it was traced.
    """

    def __init__(self) -> None:
        self.alone: str | None = None
        self.nbytes = 0
        self.traced: Traced | None = None
        self.by_width: dict[int, Program] = {}
        self.is_current: Callable[[], bool] | None = None


class Runner:
    """Runs the steps of one run of one mode.

    Args:
        step: the pure step of the model.
        live: the variables of the run.
        hold: holds signals back while arrays are out of the variables.
        donate: give the programs the arrays themselves, so that they are updated in place.
        snapshot: keep the arrays of each epoch's start, to go back to when a step fails.
        max_compiles: for how many kinds of batches this run may compile; None for any number.
    """

    def __init__(
        self,
        step: Step,
        live: Live,
        hold: Any,
        *,
        donate: bool = True,
        snapshot: bool = True,
        max_compiles: int | None = None,
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
        self._compilation = self._compiled_as()
        self._traces: dict[Kind, Traced] = {}
        self._flight: deque[Any] = deque(maxlen=IN_FLIGHT)
        self.means = Means()
        self._examined = False
        self._extras_of_trace: set[str] | None = None
        self._keep_next = True
        self.steps = 0  # of this run
        self._max_compiles = max_compiles
        self.long = True  # a run of many steps, not of one batch
        self._compiled_for: list[tuple[Kind, str]] = []  # in this run
        self._causes: dict[Kind, str] = {}
        self._key: tuple[Any, ...] = ()
        # Within a run its programs stay; a nested run must not drop them.
        if all(other.waits for other in live.record.running):
            _drop_stale(live.record, fingerprint(live.model))

    def begin_epoch(self) -> None:
        """Look up the variables and start averages anew; the next inputs become the snapshot."""
        self._check_compilation()
        with self.live.record.lock:
            self.live.recover()
            self.live.relist()
            self.live.place(where_it_is=self.live.mode == "predict" and not self.long)
            self.live.read()
            self.live.owns_metrics = True
        self.means.clear()
        # A run's first step is given copies in any case: arrays that were assigned before it may
        # belong to somebody else.
        self._keep_next = self._keep_next or self.snapshot

    def _compiled_as(self) -> tuple[Any, ...]:
        return () if self.live.mode == "predict" else _trainer.compilation(self.live.model)

    def _check_compilation(self) -> None:
        if any(map(operator.is_not, self._compiled_as(), self._compilation)):
            raise StateError(
                "The model was compiled anew (`compile`, or another `optimizer`) in the middle of a "
                "run, whose steps are made for what it had before. End the run first, e.g. with "
                "`model.stop_training = True`, compile, and start another."
            )

    def room(self, kind: Kind, wanted: int) -> int:
        """How many batches of a kind to stack for one execution; 1 for one batch at a time.

        Args:
            wanted: more have no use, such as in a short epoch.
        """
        if self.obstacle():
            return 1
        programs = self._programs_of_kind(kind)
        if wanted < 2 and not any(width > 1 for width in programs.by_width):
            return 1
        if programs.alone is None:
            with self.live.record.lock:
                programs = self._programs_for(self.live.read(), kind)
        if programs.alone:
            return 1
        # One width for a kind, so that there is one such program at most.
        return max(1, min(MOST_STEPS, MOST_BYTES // max(programs.nbytes, 1)))

    def obstacle(self) -> str:
        """Why no batches at all may share an execution; empty if they may."""
        if not self.compiled:
            return "steps run op by op (`run_eagerly`, `jit_compile=False` or `jax_disable_jit`)"
        if self.checked:
            return "`jax_debug_nans` looks at each step"
        if self.live.mode == "train" and not self.donate:
            return "`donate=False` keeps the state before every step"
        return ""

    def explain(self, kind: Kind, width: int, wanted: int, why: str) -> None:
        """Note for people to read how many steps share an execution, and why not more.

        Args:
            width: how many batches an execution has room for.
            wanted, why: how many the loop wants at most, and its reason, empty if it has none.
        """
        programs = self._programs_of_kind(kind)
        reason = self.obstacle() or programs.alone
        if not reason and width < wanted:
            what = "batches" if programs.nbytes == kind.nbytes else "outputs"
            size = f"{programs.nbytes / 2**20:.1f} MiB"
            reason = f"more {what} of {size} exceed {MOST_BYTES >> 20} MiB"
        reason = reason or why or f"{MOST_STEPS} have all of the gain"
        mode = self.live.mode
        self.live.record.choices[mode] = _facts.Choice(mode, min(width, wanted), reason)

    def most(self, kind: Kind, width: int) -> int:
        """How many of the stacked batches to run in one execution, for it not to take long."""
        if width == 1:
            return 1
        program = self._programs_of_kind(kind).by_width.get(width)
        if program is None or program.seconds is None:
            return min(width, UNTIMED)
        most = max(1, min(width, int(LONGEST / max(program.seconds, 1e-9))))
        choice = self.live.record.choices.get(self.live.mode)
        if choice and most < choice.steps and program.runs > 1:  # the first time may be unlucky
            reason = (
                f"a step takes {program.seconds * 1000:.0f} ms, an execution {LONGEST} s at most"
            )
            self.live.record.choices[self.live.mode] = choice._replace(steps=most, reason=reason)
        return most

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
        self._check_compilation()
        arrays = live.read()
        if not self.compiled:
            result = self._step_eagerly(arrays, chunk)
            self.steps += 1
            return Executed(result)
        if live.devices.mesh is not None and live.devices.distribution is None:
            leaves = live.devices.placed(chunk.leaves)
            chunk = chunk._replace(leaves=tuple(leaves))
        program = self._program(arrays, chunk)
        self.means.use(program.extras, program.extras)
        self._limit_flight(chunk)
        given, kept = program.give_up(arrays), program.keep(arrays)
        # Also later where that keeps executions short: the first times may have been unlucky.
        is_long = (program.seconds or 0) * program.width > LONGEST and not program.runs % RETIMED
        measured = program.width > 1 and (program.runs < 2 or is_long)
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
                with self._looked_at():
                    new, last, means = program.call(given, kept, self.means.running, chunk.leaves)
            else:
                limit, flag = np.int32(chunk.count), np.bool_(halt)
                new, last, means, stacked, made = program.call(
                    given, kept, self.means.running, chunk.leaves, limit, flag
                )
            if careful:
                jax.block_until_ready((new, last, stacked))
            if len(new) == len(arrays):
                arrays = list(new)
            else:
                for i, array in zip(program.written, new, strict=True):
                    arrays[i] = array
            count = int(made) if halt else chunk.count
            live.write(arrays, count)
            self.means.running = means
            program.runs += 1
            if not self.snapshot:
                live.snapshot = None
        except Exception as error:
            if program.width > 1:
                first, last = self.steps + 1, self.steps + chunk.count
                error.add_note(
                    f"fitstep: the execution of the steps {first} to {last} of this run failed; "
                    f"weights, optimizer and metrics are as before it, 0 update(s) were taken back."
                )
            raise
        finally:
            hold.release()
        if measured:
            seconds = (time.perf_counter() - began) / count
            program.seconds = min(seconds, program.seconds or seconds)
        self._flight.append(stacked if last is None else last)
        self.steps += count
        return Executed(last, stacked, count)

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        """JAX's settings for debugging, for this thread too: it may have lost sight of them."""
        if not self.checked:
            yield
            return
        nans, infs = _setting("jax_debug_nans"), _setting("jax_debug_infs")
        with jax.debug_nans(nans), jax.debug_infs(infs):
            yield

    def _limit_flight(self, chunk: Chunk) -> None:
        """Let few large chunks wait for their execution, each of which holds its memory."""
        flight = self._flight
        nbytes = self._programs_of_kind(chunk.kind).nbytes
        if len(flight) == flight.maxlen and nbytes * chunk.width > SMALL:
            jax.block_until_ready(flight[0])

    def _step_eagerly(self, arrays: list[Any], chunk: Chunk) -> Any:
        live, batch = self.live, jax.tree.unflatten(chunk.kind.structure, chunk.leaves)
        with self.hold.patiently():
            result, new = run_eagerly(self._step, live, arrays, batch)
            if live.devices.mesh is not None:
                new = [_devices.like(one, old) for one, old in zip(new, arrays, strict=True)]
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
            traced = trace(self._step, self.live, arrays, kind, donate=False)
        except Exception:  # noqa: BLE001 - eager steps may do what no trace can
            return None
        return set(traced.extras)

    def _program(self, arrays: list[Any], chunk: Chunk) -> Program:
        programs = self._programs_for(arrays, chunk.kind)
        program = programs.by_width.get(chunk.width)
        if program is None:
            began = time.perf_counter()
            traced = self._traces.get(chunk.kind) or programs.traced
            with self.hold.patiently():
                if traced is None:
                    traced = self._trace(arrays, chunk.kind)
                if self.checked:
                    program = checked_step(traced)
                else:
                    compiled = lower(traced, chunk.width).compile()
                    program = Program(compiled, traced, width=chunk.width)
            programs.by_width[chunk.width] = program
            self._note(chunk, time.perf_counter() - began)
        return program

    def compile_ahead(self, kind: Kind, wanted: int) -> None:
        """Trace now, and compile in a thread what `execute` will need, if the model stays so."""
        if self.obstacle():
            return
        began = time.perf_counter()
        programs = self._programs_for(self.live.read(), kind)
        width, record = self.room(kind, wanted), self.live.record
        traced = self._traces.get(kind) or programs.traced
        if width in programs.by_width or traced is None:
            return
        lowered = lower(traced, width)
        described, cause = _facts.described(kind), self._causes.pop(kind, "the first")
        # No reference to the arrays of this moment, which the training is about to replace.
        model, before = weakref.ref(self.live.model), fingerprint(self.live.model)

        def compile_it() -> None:
            with suppress(Exception):  # it comes again where the program is needed
                programs.by_width[width] = Program(lowered.compile(), traced, width=width)
                seconds = time.perf_counter() - began
                record.compilations.append(
                    _facts.Compilation(traced.mode, described, width, seconds, cause)
                )

        def is_current() -> bool:
            thread.join()
            return not differences(before, fingerprint(model())) - record.changed_by_traces

        thread = threading.Thread(target=compile_it, name="fitstep-compile")
        thread.start()
        programs.is_current = is_current

    def _note(self, chunk: Chunk, seconds: float) -> None:
        record, mode = self.live.record, self.live.mode
        cause = self._causes.pop(chunk.kind, "")
        if not cause:
            cause = "several steps" if chunk.width > 1 else "one step alone"
        record.compilations.append(
            _facts.Compilation(mode, _facts.described(chunk.kind), chunk.width, seconds, cause)
        )

    def _programs_of_kind(self, kind: Kind) -> Programs:
        live = self.live
        if live.wiring is not self._wiring:
            self._wiring = live.wiring
            self._traces.clear()
            self._key = (
                live.mode,
                self.donate,
                self.checked,
                _setting("jax_enable_x64"),
                _setting("jax_default_matmul_precision"),
                _setting("jax_default_prng_impl"),
                _setting("jax_threefry_partitionable"),
                _setting("jax_numpy_dtype_promotion"),
                _setting("jax_default_device"),
                self._devices_key(),
                live.wiring.signature,
            )
            # What JAX compiles itself keeps the model alive, so it must not outlive the run.
            kept = self._own_programs if self.checked else live.record.programs
            self._programs = kept.setdefault(self._key, {})
        programs = self._programs.setdefault(kind, Programs())
        if programs.is_current is None:
            return programs
        with live.record.lock:
            if programs.is_current is not None and not programs.is_current():
                self._programs[kind] = Programs()
            programs.is_current = None
        return self._programs[kind]

    def _devices_key(self) -> Any:
        live = self.live
        if live.devices.mesh is None:
            return None
        return live.devices.key(), _devices.shardings(_values.read(live.wiring.variables))

    def _programs_for(self, arrays: list[Any], kind: Kind) -> Programs:
        """The programs of a kind of batch; the first time it is traced, to know what is in it."""
        programs = self._programs_of_kind(kind)
        if programs.alone is None:
            self._causes[kind] = self._cause(kind)
            self._check_compiles(kind)
            with self.hold.patiently():
                traced = self._trace(arrays, kind)
            programs.alone = _alone(traced)
            programs.nbytes = max(kind.nbytes, _nbytes(traced.results[1]))
            programs.traced = traced.without_model()
        return programs

    def _cause(self, kind: Kind) -> str:
        """Why the programs that are there do not do for this kind of batch, in words."""
        record, mode = self.live.record, self.live.mode
        if stale := record.stale.pop(mode, ""):
            return f"{_MODEL_CHANGED}: {stale}"
        others = [known for known in self._programs if known is not kind and known != kind]
        if others:
            return "another batch"
        keys = [key for key in record.programs if key[0] == mode and key != self._key]
        return f"changed: {_facts.changed(keys[-1], self._key)}" if keys else "the first"

    def _check_compiles(self, kind: Kind) -> None:
        """Say what was compiled for before, from the third kind of batch in a run on.

        Raises:
            DataError: if it is one more compilation than was allowed.
        """
        mode, record, cause = self.live.mode, self.live.record, self._causes[kind]
        # Steps that are called one by one are each a run of their own.
        compiled_for = self._compiled_for if self.long else record.compiled_for.setdefault(mode, [])
        here = _facts.described(kind) + ("" if cause in _USUAL else f" ({cause})")
        kinds, count = {known for known, _ in compiled_for}, len(compiled_for)
        before = "; ".join(text for _, text in compiled_for[-_MOST_NAMED:])
        before = f"{count - _MOST_NAMED} others; {before}" if count > _MOST_NAMED else before
        if self._max_compiles is not None and count >= self._max_compiles:
            raise DataError(
                f"`{METHODS[mode]}` would be compiled once more than `max_compiles="
                f"{self._max_compiles}` allows, for {here}. Compiled in this run for: "
                f"{before or 'nothing'}. Give all batches one shape, e.g. by padding, and drop "
                f"the remainder or allow one more compilation for it."
            )
        changes = sum(_MODEL_CHANGED in text for _, text in compiled_for)
        model_changed = cause.startswith(_MODEL_CHANGED) and changes >= _PATIENCE
        # Nobody can give sparse batches equally many entries, so nobody is told to.
        another = kind not in kinds and len(kinds) >= 2 and not _facts.is_sparse(kind)
        if model_changed or another:
            advice = "Give all batches one shape, e.g. by padding to a few fixed lengths"
            if model_changed:
                advice = "Keep what changes in a `keras.Variable`, or out of the model"
            elif self.long:
                advice += "; `max_compiles=` makes one too many an error"
            warn(
                f"`{METHODS[mode]}` is compiled once more, for {here}. Before, for: {before}. Each "
                f"time costs as much as the first. {advice}.",
            )
        compiled_for.append((kind, here))

    def _trace(self, arrays: list[Any], kind: Kind) -> Traced:
        before, record = fingerprint(self.live.model), self.live.record
        if differences(record.fingerprint or {}, before) - record.changed_by_traces:
            record.is_mixed = True
        traced = trace(self._step, self.live, arrays, kind, donate=self.donate)
        self._traces[kind] = traced
        # What the trace itself changed, such as a counter of traces, makes nothing stale.
        changed = differences(before, fingerprint(self.live.model))
        record.changed_by_traces |= changed
        return traced


def _alone(traced: Traced) -> str:
    """Why steps like this one never share an execution, in words; empty if they may."""
    if traced.holds("callback"):
        return "a callback into Python, which is to find the model as its step leaves it"
    if jax.default_backend() == "cpu" and traced.holds("conv_general_dilated"):
        return "a convolution, which a CPU runs 3 to 40 times slower within a loop"
    return ""


def _nbytes(described: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(described))


def _setting(name: str) -> Any:
    """A setting of JAX as it is now, also within its context managers."""
    return getattr(jax.config, name)


def _equals_one(value: Any, results: list[Any]) -> bool:
    return any(np.array_equal(value, result, equal_nan=True) for result in results)


def _drop_stale(record: Record, current: dict[Any, Any]) -> None:
    """Forget the programs of a model whose Python side has changed since the last run."""
    changed = differences(record.fingerprint or {}, current) - record.changed_by_traces
    if record.fingerprint is not None and (changed or record.is_mixed):
        # `trainable` is a property, of which Keras keeps the value under another name.
        found = {"trainable" if name == "_trainable" else name for _, name in changed if name}
        names = sorted(f"`{name}`" for name in found) or ["its layers"]
        modes = {key[0] for key in record.programs}
        record.stale.update(dict.fromkeys(modes, ", ".join(names[:5])))
        record.programs.clear()
        record.changed_by_traces.clear()
        record.is_mixed = False
    record.fingerprint = current
