"""The command `fitstep`: one command, one file.

This file answers `--help` and `--version`, and what it imports is paid for by each of them, so it
imports neither Keras nor a command: a command's file is imported when the command is called.
"""

import argparse
import contextlib
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from fitstep import __version__
from fitstep.cli._flags import UsageError

COMMANDS = {
    "train": "train an experiment: a Python file or a built-in one",
    "bench": "time fs.fit beside stock fit on this machine, with your model if you like",
    "doctor": "say what training would run on here, and what is wrong",
}
USAGE, INTERRUPTED = 2, 130  # exit codes; 1 is an exception of the user's own code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: the user's own code raised, or `doctor` found a problem. 2: the command line, the experiment file or the
    output folder is wrong, found before any training. 3: trained, but not all of it could be
    kept. 130: Ctrl-C (143: SIGTERM).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["train"]:
            from fitstep.cli import _train

            return _train.command(arguments[1:])
        if arguments[:1] == ["bench"]:
            from fitstep.cli import _bench

            return _bench.command(arguments[1:])
        if arguments[:1] == ["doctor"]:
            from fitstep.cli import _doctor

            return _doctor.command(arguments[1:])
        return _without_command(arguments)
    except UsageError as error:
        print(f"fitstep: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("fitstep: interrupted.", file=sys.stderr)
        return INTERRUPTED


def _without_command(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {arguments[0]!r}. {hint}")
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as done:  # argparse's way to end after --help
        return int(done.code or 0)
    if options.version:
        with contextlib.suppress(BrokenPipeError):
            print(f"fitstep {__version__}", flush=True)
        return 0
    raise UsageError("which command? `fitstep train EXPERIMENT` trains; `fitstep --help` lists all")


class _OneLineParser(argparse.ArgumentParser):
    """argparse prints its usage before an error; here an error is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `fitstep --help` lists what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="fitstep",
        description="Your training step, Keras's fit, on JAX.",
        epilog="`fitstep COMMAND --help` says more about a command.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about)
    return parser
