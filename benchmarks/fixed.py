"""What one step costs in a call of its own, when all is compiled: fitstep beside stock Keras (ms)."""

import statistics
from collections.abc import Callable

import keras

import fitstep as fs
from benchmarks.models import Case, cases
from benchmarks.timing import interleaved, ratio

PAIRS = 15


def with_engine(case: Case) -> keras.Model:
    """The case's model, as a model that has fitstep's engine behind its own methods."""
    model = case.build()
    ours = fs.Model(model.inputs, model.outputs)
    ours.compile("adam", model.loss)
    return ours


def calls(model: keras.Model, case: Case) -> dict[str, Callable[[], object]]:
    """The calls that make one step each."""
    x, y = case.x[: case.batch_size], case.y[: case.batch_size]
    return {
        "fit": lambda: model.fit(x, y, batch_size=case.batch_size, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, y),
        "predict_on_batch": lambda: model.predict_on_batch(x),
    }


def main() -> None:
    print("| model | call | stock | fitstep | ratio |")
    print("|---|---|---|---|---|")
    for case in cases():
        stock, ours = calls(case.build(), case), calls(with_engine(case), case)
        for name in stock:
            seconds = interleaved({"stock": stock[name], "ours": ours[name]}, PAIRS)
            cells = [
                case.name,
                name,
                f"{statistics.median(seconds['stock']) * 1e3:.1f}",
                f"{statistics.median(seconds['ours']) * 1e3:.1f}",
                ratio(seconds["ours"], seconds["stock"]),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
