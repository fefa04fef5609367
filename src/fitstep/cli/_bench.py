"""`fitstep bench [MODULE:FACTORY] [--pairs N] [--json]`: fs.fit beside stock fit, here and now."""

import argparse
import contextlib
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fitstep._backend import choose_jax
from fitstep._errors import BackendError
from fitstep._run import Run
from fitstep.cli import _experiment, _flags
from fitstep.cli._experiment import ExperimentError
from fitstep.cli._flags import Flag, UsageError
from fitstep.cli._traceback import own_traceback

PAIRS = 9
AT_MOST = 15.0  # seconds of pairs for one model, where their number was not asked for
SHORTEST = 0.2  # seconds of one timed fit: shorter ones are made of several epochs
MOST_EPOCHS = 200
FLAGS = (
    Flag("pairs", int, default=None, help="timed fits of each side"),
    Flag("json", bool, default=False, help="print one JSON object"),
)
HELP = ("-h", "--help")


class Subject(NamedTuple):
    """What is timed: `build` gives a run with a model of its own each time."""

    name: str
    build: Callable[[], Run]


class Row(NamedTuple):
    """What came out: seconds by side, the steps of each timed fit, and of each execution of ours."""

    name: str
    steps: int
    seconds: Mapping[str, Sequence[float]]
    together: int


def command(tokens: Sequence[str]) -> int:
    """Time the built-in models, or the user's own; returns the exit code."""
    if any(token in HELP for token in tokens):
        _print_help()
        return 0
    factory = tokens[0] if tokens and not tokens[0].startswith("-") else None
    values = _flags.parse(tokens[factory is not None :], FLAGS)
    pairs, as_json = values.get("pairs"), values.get("json", False)
    if pairs is not None and pairs < 1:
        raise UsageError(f"--pairs must be at least 1. Received: {pairs}")
    try:
        choose_jax()
        # With --json, standard output is the object's alone.
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            rows = _measured(factory, pairs)
        if as_json:
            print(json.dumps(_as_json(rows), indent=2))
    except (BackendError, ExperimentError, UsageError) as error:
        print(f"fitstep bench: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001 - told as the user's own program would tell it
        print(own_traceback(error, _file_of(factory)), end="", file=sys.stderr)
        return 1
    return 0


def _measured(factory: str | None, pairs: int | None) -> list[Row]:
    from fitstep.records._console import open_console

    subjects = _built_in() if factory is None else [Subject(factory, _own(factory))]
    with open_console(sys.stdout) as console:
        console.say("Each model is built twice: one is trained by stock fit, one by fs.fit.")
        rows = []
        for number, subject in enumerate(subjects, start=1):
            console.begin(subject.name, number, len(subjects), pairs or PAIRS, unit="pair")
            rows.append(row := _time(subject, pairs, console))
            console.end(f"{row.name}: fs.fit takes {_ratio(row)} of stock fit's time")
        console.table([_cells(row) for row in rows])
        few = min(len(row.seconds["fs"]) for row in rows)
        console.say(
            f"us/step, medians of {few} interleaved fits with shuffling and without a progress "
            "bar; [quartiles of the ratio]"
        )
    return rows


def _time(subject: Subject, pairs: int | None, console: Any) -> Row:
    from fitstep import explain, fit
    from fitstep.records._timings import interleaved, ratio

    stock, ours = subject.build(), subject.build()
    _check_two(subject.name, stock, ours)
    steps, epochs = _calibrated(stock)

    def heard(turn: int, seconds: Mapping[str, Sequence[float]]) -> None:
        console.epoch(turn, {"fs / stock": ratio(seconds["fs"], seconds["stock"]).middle})

    runs = {
        "stock": lambda: _stock_fit(stock.model)(**_arguments(stock, epochs)),
        "fs": lambda: fit(ours.model, **_arguments(ours, epochs)),
    }
    at_most = math.inf if pairs else AT_MOST
    seconds = interleaved(runs, pairs or PAIRS, at_most=at_most, after_turn=heard)
    choice = next(one for one in explain(ours.model).choices if one.mode == "train")
    return Row(subject.name, steps * epochs, seconds, choice.steps)


def _calibrated(run: Run) -> tuple[int, int]:
    """The steps of an epoch, and how many epochs make a timed fit long enough."""
    import keras

    from fitstep.records._timings import interleaved

    last = [0]
    # `fit` calls this after each step; it is not there when the time counts.
    counting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: last.__setitem__(0, batch)
    )
    fit, arguments = _stock_fit(run.model), _arguments(run, epochs=1)
    fit(**arguments | {"callbacks": [*run.callbacks, counting]})
    taken = interleaved({"stock": lambda: fit(**arguments)}, pairs=1)["stock"][0]
    return last[0] + 1, max(1, min(MOST_EPOCHS, math.ceil(SHORTEST / taken)))


def _arguments(run: Run, epochs: int) -> dict[str, Any]:
    return {
        "x": run.x,
        "y": run.y,
        "batch_size": run.batch_size,
        "epochs": epochs,
        "verbose": 0,
        "callbacks": list(run.callbacks),
        "shuffle": run.shuffle,
        "class_weight": run.class_weight,
        "sample_weight": run.sample_weight,
        "steps_per_epoch": run.steps_per_epoch,
    }


def _stock_fit(model: Any) -> Callable[..., Any]:
    """Keras's own loop, also for a model whose own `fit` is fitstep's."""
    from fitstep._keras import _trainer

    if _trainer.has_engine(model):
        return lambda **arguments: _trainer.StockTrainer.fit(model, **arguments)
    return model.fit


# --- what is timed ----------------------------------------------------------------------------


def _built_in() -> list[Subject]:
    from fitstep.cli._cases import Case, cases

    def build(case: Case) -> Run:
        return Run(case.build(), case.x, case.y, batch_size=case.batch_size)

    return [Subject(case.name, lambda case=case: build(case)) for case in cases()]


def _own(argument: str) -> Callable[[], Run]:
    """The factory that `module:factory` or `path.py:factory` names.

    Raises:
        ExperimentError: if there is none, or it takes arguments.
    """
    where, colon, name = argument.rpartition(":")
    if not (where and colon and name.isidentifier()):
        raise ExperimentError(
            "give MODULE:FACTORY or FILE.py:FACTORY, a function that returns (model, x, y) or an "
            f"fs.Run. Received: {argument!r}"
        )
    factory = vars(_module(where)).get(name)
    if not callable(factory):
        raise ExperimentError(f"{where} has no function `{name}`")
    try:
        inspect.signature(factory).bind()
    except TypeError:
        raise ExperimentError(
            f"`{name}` in {where} must take no arguments. Received: `{inspect.signature(factory)}`"
        ) from None
    return lambda: _checked(factory(), argument)


def _module(where: str) -> Any:
    file = _file_of(f"{where}:")
    if file is not None:
        return _experiment.execute(file, file.read_bytes())
    if where.endswith(".py"):
        raise ExperimentError(f"the file {where} does not exist")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise ExperimentError(
                f"there is no module {where!r}, here or installed. Is it a file? Write "
                f"{where.replace('.', '/')}.py"
            ) from error
        raise  # an import inside the module


def _file_of(argument: str | None) -> Path | None:
    path = Path((argument or "").rpartition(":")[0])
    return path.resolve() if path.suffix == ".py" and path.is_file() else None


def _checked(made: Any, argument: str) -> Run:
    if isinstance(made, tuple) and len(made) == 3:
        made = Run(*made)
    if not isinstance(made, Run):
        hint = ". Is a `return` missing?" if made is None else ""
        raise ExperimentError(
            f"{argument} must return (model, x, y) or an fs.Run. "
            f"Received: {type(made).__name__}{hint}"
        )
    if hasattr(made.x, "__next__"):
        raise ExperimentError(
            f"{argument} returns data that can be passed over only once, and each side is timed "
            f"several times: give arrays or a PyDataset. Received: {type(made.x).__name__}"
        )
    return made


def _check_two(name: str, one: Run, other: Run) -> None:
    if one.model is other.model:
        raise ExperimentError(
            f"{name} returned the same model twice, but each side trains one of its own: build "
            "the model inside the function"
        )


# --- what is said -----------------------------------------------------------------------------


def _ratio(row: Row) -> Any:
    from fitstep.records._timings import ratio

    return ratio(row.seconds["fs"], row.seconds["stock"])


def _cells(row: Row) -> dict[str, str]:
    from fitstep.records._timings import microseconds

    costs = {name: microseconds(taken, row.steps) for name, taken in row.seconds.items()}
    return {
        "model": row.name,
        "stock fit": f"{costs['stock']:.0f}",
        "fs.fit": f"{costs['fs']:.0f}",
        "fs / stock": str(_ratio(row)),
        "steps together": str(row.together),
    }


def _as_json(rows: Sequence[Row]) -> dict[str, Any]:
    from fitstep.records._environment import environment

    return {
        "environment": environment(),
        "rows": [
            {
                "model": row.name,
                "steps": row.steps,
                "steps_together": row.together,
                "seconds": dict(row.seconds),
            }
            | {"fs_over_stock": _ratio(row)._asdict()}
            for row in rows
        ],
    }


def _print_help() -> None:
    parser = argparse.ArgumentParser(
        prog="fitstep bench",
        usage="fitstep bench [MODULE:FACTORY | FILE.py:FACTORY] [--pairs N] [--json]",
        description="Time fs.fit beside stock fit on this machine: four small models, or your own.",
        epilog=(
            "FACTORY is a function without arguments that returns (model, x, y) or an fs.Run, "
            "and builds a new compiled model each time. Its callbacks are called; validation is "
            "left out. The machine should have nothing else to do."
        ),
    )
    parser.add_argument("--pairs", metavar="N", help=f"timed fits of each side (default: {PAIRS})")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.print_help()
