"""What `fitstep train` prints: bars on a terminal, plain lines everywhere else.

Plain are pipes, files, CI logs, `TERM=dumb` and `NO_COLOR`: there, not one escape code is written.
"""

import io
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, TextIO

SECONDS_BETWEEN_LINES = 1.0


class Console(Protocol):
    """What a console does while runs go on."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def say(self, text: str) -> None:
        """Print a sentence."""
        ...

    def begin(self, name: str, number: int, count: int, epochs: int, unit: str = "epoch") -> None:
        """Run `name` begins, the `number`th of `count`, with at most `epochs` epochs.

        `unit` is another word for what is counted.
        """
        ...

    def epoch(self, number: int, logs: Mapping[str, Any]) -> None:
        """Epoch `number`, counted from 1, is over."""
        ...

    def end(self, text: str) -> None:
        """The run is over; `text` is its closing line."""
        ...

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the experiment's report."""
        ...


def open_console(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> Console:
    """The console that suits a stream; a silent one where there is none."""
    if stream is None or stream.closed:
        return PlainConsole(None)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a display that cannot show a name ends no training
    plain = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    if plain or not stream.isatty():
        return PlainConsole(stream)
    return LiveConsole(stream)


class PlainConsole:
    """One line per epoch, or one a second where epochs are shorter."""

    def __init__(self, stream: TextIO | None, clock: Any = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._run = ""
        self._epochs = 0
        self._unit = ""
        self._last_line = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def say(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            encoding = self._stream.encoding or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError):
            # Whoever read this has gone (`| head`, a closed terminal); the training is not theirs.
            self._stream = None
            _point_at_nothing(sys.stdout)

    def begin(self, name: str, number: int, count: int, epochs: int, unit: str = "epoch") -> None:
        self._run, self._epochs, self._unit = name, epochs, unit
        self._last_line = -math.inf

    def epoch(self, number: int, logs: Mapping[str, Any]) -> None:
        if self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = self._clock()
            self.say(f"{self._run}  {self._unit} {number}/{self._epochs}  {figures(logs)}")

    def end(self, text: str) -> None:
        self.say(text)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = table_cells(rows)
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        right = [all(map(_is_numeric, column)) for column in zip(*cells, strict=True)]
        for row in (columns, *cells):
            padded = (
                cell.rjust(width) if numeric else cell.ljust(width)
                for cell, width, numeric in zip(row, widths, right, strict=True)
            )
            self.say("  ".join(padded).rstrip())


class LiveConsole:
    """Bars for the runs and for the epochs of the present one, with its latest figures."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = RichConsole(file=stream, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )
        self._runs: Any = None
        self._epochs: Any = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._quietly(self._progress.stop)

    def say(self, text: str) -> None:
        self._quietly(self._console.print, text)

    def begin(self, name: str, number: int, count: int, epochs: int, unit: str = "epoch") -> None:
        del unit  # a bar shows no word for it
        if count > 1 and self._runs is None:
            self._runs = self._progress.add_task("runs", total=count, figures="")
        if self._epochs is not None:
            self._progress.remove_task(self._epochs)
        self._epochs = self._progress.add_task(name, total=epochs, figures="")

    def epoch(self, number: int, logs: Mapping[str, Any]) -> None:
        self._progress.update(self._epochs, completed=number, figures=figures(logs))

    def end(self, text: str) -> None:
        if self._runs is not None:
            self._progress.advance(self._runs)
        self.say(text)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        columns, cells = table_cells(rows)
        table = Table(box=box.SIMPLE_HEAD)
        for column, values in zip(columns, zip(*cells, strict=True), strict=True):
            numeric = all(map(_is_numeric, values))
            table.add_column(Text(column), justify="right" if numeric else "left")
        for row in cells:
            table.add_row(*map(Text, row))
        self._quietly(self._console.print, table)

    def _quietly(self, write: Any, *arguments: Any) -> None:
        try:
            write(*arguments)
        except (OSError, ValueError):  # the terminal has been closed; the training goes on
            _point_at_nothing(sys.stdout)


def figures(logs: Mapping[str, Any]) -> str:
    """`loss 0.5123  auc 0.7841`: each name with its value in four digits."""
    return "  ".join(f"{name} {_cell(value)}" for name, value in logs.items())


def table_cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The columns of a report, in the order they first appear, and the cells of its rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [str(column) for column in columns], [
        [_cell(row[column]) if column in row else "" for column in columns] for row in rows
    ]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str | int):
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return f"{number:.4f}" if 1e-3 <= abs(number) < 1e4 or number == 0 else f"{number:.3e}"


def _is_numeric(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell == ""
    return True


def _point_at_nothing(stream: TextIO) -> None:
    """Send what is still written to a broken stream nowhere, or Python complains at its end."""
    with suppress(OSError, ValueError):  # not a real file: nothing is flushed to it at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
