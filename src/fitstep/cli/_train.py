"""`fitstep train EXPERIMENT [--field value ...] [--out DIR]`."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fitstep import experiments
from fitstep._backend import choose_jax
from fitstep._errors import BackendError
from fitstep.cli import _flags
from fitstep.cli._experiment import Experiment, ExperimentError, built_in, find, load
from fitstep.cli._flags import Flag, UsageError
from fitstep.cli._signals import sigterm_as_ctrl_c
from fitstep.cli._traceback import own_traceback

INCOMPLETE = 3  # trained, but not all of it could be kept
HELP = ("-h", "--help")
OUT = Flag(
    "out",
    str,
    default=None,
    help="the run folder, new or empty (default: runs/EXPERIMENT-<UTC time>)",
)


def command(tokens: Sequence[str]) -> int:
    """Train an experiment; returns the exit code."""
    if tokens and tokens[0] in HELP:
        _parser("EXPERIMENT", "Train an experiment.", _list_of_experiments()).print_help()
        return 0
    if not tokens or tokens[0].startswith("-"):
        where = f" before {tokens[0]}" if tokens else ""
        raise UsageError(
            f"which experiment? Give a Python file{where}, or a built-in one: {built_in()}"
        )
    path = None
    try:
        choose_jax()
        path = find(tokens[0])
        experiment = load(path)
        flags = _checked_flags(experiment)
        if any(token in HELP for token in tokens[1:]):
            _print_help(tokens[0], experiment, flags)
            return 0
        values = _flags.parse(tokens[1:], (*flags, OUT))
        return _train(experiment, values, values.pop("out", None))
    except (BackendError, ExperimentError, UsageError) as error:
        print(f"fitstep train {tokens[0]}: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001 - told as the user's own program would tell it
        _print_own(error, path)
        return 1


def _train(experiment: Experiment, values: dict[str, Any], out: str | None) -> int:
    # Imported here, so that a wrong flag need not wait for them.
    from fitstep.cli._session import Session
    from fitstep.records._console import open_console
    from fitstep.records._run_folder import RunFolderError, claim

    config = experiment.config_class(**values)
    begun = datetime.now(UTC)
    if out == "":
        raise UsageError("--out expects a folder. Received: an empty text")
    console = open_console(sys.stdout)
    try:
        folder = claim(out, experiment.name, begun)
    except RunFolderError as error:
        raise UsageError(str(error)) from error
    with console, sigterm_as_ctrl_c() as signals:
        session = Session(experiment, config, folder, console, begun)
        try:
            complete = session.train()
        except RunFolderError as error:
            raise UsageError(str(error)) from error
        except KeyboardInterrupt:
            console.say(f"Interrupted. {session.standing()}")
            return signals.exit_code
        except Exception:
            console.say(f"Failed. {session.standing()}")
            raise
        except SystemExit:
            console.say(f"Stopped by `sys.exit`. {session.standing()}")
            raise
    return 0 if complete else INCOMPLETE


def _checked_flags(experiment: Experiment) -> tuple[Flag, ...]:
    flags = _flags.flags_of(experiment.config_class)
    taken = {"--help": "--help", "--no-help": "--help", "--out": "--out", "--no-out": "--out"}
    for flag in flags:
        for name in (flag.name, flag.negation)[: 2 if flag.kind is bool else 1]:
            if name in taken:
                raise ExperimentError(
                    f"the field `{flag.field}` of `Config` in {experiment.path.name} would be "
                    f"the flag {name}, which {taken[name]} has already. Rename the field"
                )
            taken[name] = f"the field `{flag.field}`"
    return flags


def _parser(experiment: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"fitstep train {experiment}",
        usage=f"fitstep train {experiment} [--field value ...] [--out DIR]",
        description=description,
        epilog=epilog,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
    )


def _print_help(name: str, experiment: Experiment, flags: Sequence[Flag]) -> None:
    parser = _parser(name, experiment.about)
    _flags.add_to_help(parser.add_argument_group("fields of Config"), flags)
    parser.add_argument("--out", metavar="DIR", help=OUT.help)
    parser.print_help()


def _list_of_experiments() -> str:
    lines = [f"  {name:<16}{experiments.summary(name)}" for name in experiments.names()]
    return "\n".join(
        [
            "EXPERIMENT is a Python file with a frozen dataclass `Config`, whose fields become",
            "flags, and a function `build(config)` that returns an fs.Run or a dict of them;",
            "`fitstep train EXPERIMENT --help` shows its flags. Built-in experiments:",
            *lines,
        ]
    )


def _print_own(error: Exception, path: Path | None) -> None:
    """Print a user's exception as their own program would have."""
    with contextlib.suppress(
        AttributeError, ValueError, OSError
    ):  # there may be none, or a closed one
        sys.stdout.flush()
    print(own_traceback(error, path), end="", file=sys.stderr)
