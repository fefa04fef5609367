"""What one step costs in a call of its own, when all is compiled: fitstep beside stock Keras (ms)."""

import statistics
from collections.abc import Callable

import keras

from benchmarks.models import bounded_cases
from benchmarks.steps import with_engine
from fitstep.cli._cases import Case
from fitstep.records._timings import interleaved, ratio

KINDS = ("MLP 2x64", "CNN", "20 x", "Transformer")


def calls(model: keras.Model, case: Case) -> dict[str, Callable[[], object]]:
    """The calls that make one step each."""
    x, y = case.x[: case.batch_size], case.y[: case.batch_size]
    return {
        "fit": lambda: model.fit(x, y, batch_size=case.batch_size, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, y),
        "predict_on_batch": lambda: model.predict_on_batch(x),
    }


def main(pairs: int) -> None:
    print("| model | call | stock | fitstep | ratio |")
    print("|---|---|---|---|---|")
    for case in (bounds.case for bounds in bounded_cases()):
        if not case.name.startswith(KINDS):
            continue
        stock, ours = calls(case.build(), case), calls(with_engine(case), case)
        for name in stock:
            seconds = interleaved({"stock": stock[name], "ours": ours[name]}, pairs)
            cells = [
                case.name,
                name,
                f"{statistics.median(seconds['stock']) * 1e3:.1f}",
                f"{statistics.median(seconds['ours']) * 1e3:.1f}",
                str(ratio(seconds["ours"], seconds["stock"])),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
