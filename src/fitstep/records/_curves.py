"""`curves.png`: the loss and every metric by epoch, training and validation in one panel."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_PANELS = 12
WIDTH, HEIGHT = 4.0, 3.0  # inches, of one panel


def panels(history: Mapping[str, Sequence[Any]]) -> list[str]:
    """The names that get a panel: the loss first, the others in the order they came in.

    A `val_` name shares the panel of its training twin; one without a twin gets its own. What is
    not a number for each epoch has no curve.
    """
    drawable = [name for name, values in history.items() if all(map(_is_number, values))]
    names = dict.fromkeys(name.removeprefix("val_") for name in drawable)
    return sorted(names, key=lambda name: name != "loss")[:MOST_PANELS]


def draw(history: Mapping[str, Sequence[Any]], title: str, path: Path) -> None:
    """Draw the curves into a PNG file.

    Raises:
        ModuleNotFoundError: if Matplotlib is not installed.
    """
    # A figure with a canvas of its own: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = panels(history)
    columns = min(3, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_literal(title), fontsize="medium")
    for number, name in enumerate(names, start=1):
        axes = figure.add_subplot(rows, columns, number)
        for key, label in ((name, "training"), (f"val_{name}", "validation")):
            if key in history:
                epochs = range(1, len(history[key]) + 1)
                axes.plot(epochs, history[key], marker="." if len(epochs) < 20 else "", label=label)
        axes.set_title(_literal(name), fontsize="small")
        axes.set_xlabel("epoch", fontsize="small")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _literal(text: str) -> str:
    return text.replace("$", r"\$")  # Matplotlib sets mathematics between dollars
