"""What grows: cost per step and memory with the rows, with the variables, and with the epochs.

Cost per step and memory over the data should not depend on the rows; the cost of many variables
and the fixed cost of an epoch and of a call are held against stock `fit`'s.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers

import fitstep as fs
from fitstep.records._timings import interleaved, microseconds, ratio

ROWS = (10**4, 10**5, 10**6, 10**7)
FEATURES, BATCH = 4, 256  # 160 MB at 10^7 rows
SLOW = 3  # pairs at most, where one takes ten seconds
ARRAYS = (10, 100, 1000, 3000)
EPOCHS = 101

# A process each, whose peak Linux keeps in /proc (what `getrusage` tells begins with the parent's).
_MEMORY = """
import pathlib, sys
import fitstep as fs
from benchmarks.growth import BATCH, narrow, narrow_data
def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
side, rows = sys.argv[1], int(sys.argv[2])
model, data = narrow(), narrow_data(rows)
fit = model.fit if side == "stock" else lambda *a, **k: fs.fit(model, *a, **k)
few = [array[: 64 * BATCH] for array in data]
fit(*few, batch_size=BATCH, verbose=0, shuffle=False)  # compiles
before = peak()
fit(*data, batch_size=BATCH, verbose=0)
print((peak() - before) / 1024)
"""


def narrow() -> keras.Model:
    model = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(8, "relu"), layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def narrow_data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    # Drawn as float32: a float64 copy on the way would be the peak.
    x = np.random.default_rng(0).random((rows, FEATURES), dtype="float32")
    return x, x[:, :1].copy()


def broad(arrays: int) -> keras.Model:
    """About so many arrays of weights and Adam's moments: six of each layer.

    The layers stand side by side; one behind the other, three thousand arrays compile for minutes.
    """
    inputs = layers.Input((4,))
    side_by_side = [layers.Dense(4)(inputs) for _ in range(max(2, arrays // 6))]
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(side_by_side)))
    model.compile("adam", "mse")
    return model


def both(
    build: Callable[[], keras.Model], *data: Any, **options: Any
) -> dict[str, Callable[[], object]]:
    """A fit with stock Keras, and one with fitstep, of a model each."""
    return {
        "stock": partial(build().fit, *data, verbose=0, **options),
        "fs": partial(fs.fit, build(), *data, verbose=0, **options),
    }


def rows(pairs: int) -> None:
    print(f"rows of {FEATURES} features, batch {BATCH}, shuffled; us/step, and MB over the data")
    print("| rows | stock | fs.fit | fs / stock | stock, peak | fs, peak |")
    print("|---|---|---|---|---|---|")
    for count in ROWS:
        epochs = max(1, 10**5 // count)
        steps = -(-count // BATCH) * epochs
        runs = both(narrow, *narrow_data(count), batch_size=BATCH, epochs=epochs)
        seconds = interleaved(runs, pairs if count < ROWS[-1] else min(pairs, SLOW))
        costs = [f"{microseconds(taken, steps):.0f}" for taken in seconds.values()]
        peaks = [f"{_peak(side, count):.0f}" for side in seconds]
        cells = [str(count), *costs, str(ratio(seconds["fs"], seconds["stock"])), *peaks]
        print(f"| {' | '.join(cells)} |", flush=True)


def _peak(side: str, count: int) -> float:
    command = [sys.executable, "-c", _MEMORY, side, str(count)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def variables(pairs: int) -> None:
    print("arrays of weights and Adam's moments, batch 32; us/step")
    print("| arrays | stock | fs.fit | fs / stock |")
    print("|---|---|---|---|")
    generator = np.random.default_rng(0)
    for count in ARRAYS:
        steps = max(16, min(480, 48000 // count))
        x = generator.normal(size=(32 * steps, 4)).astype("float32")
        seconds = interleaved(both(partial(broad, count), x, x[:, :1], batch_size=32), pairs)
        costs = [f"{microseconds(taken, steps):.0f}" for taken in seconds.values()]
        cells = [str(count), *costs, str(ratio(seconds["fs"], seconds["stock"]))]
        print(f"| {' | '.join(cells)} |", flush=True)


def epochs(pairs: int) -> None:
    x, y = narrow_data(BATCH)
    one = both(narrow, x, y, batch_size=BATCH)
    many = both(narrow, x, y, batch_size=BATCH, epochs=EPOCHS)
    seconds = interleaved(
        {f"{s} 1": one[s] for s in one} | {f"{s} n": many[s] for s in many}, pairs
    )
    of_epoch = {
        side: [
            (many - one) / (EPOCHS - 1)
            for one, many in zip(seconds[f"{side} 1"], seconds[f"{side} n"], strict=True)
        ]
        for side in one
    }
    for what, stock, ours in (
        ("call of one step", seconds["stock 1"], seconds["fs 1"]),
        ("further epoch of one step", of_epoch["stock"], of_epoch["fs"]),
    ):
        costs = [f"{statistics.median(taken) * 1e3:.2f} ms" for taken in (stock, ours)]
        print(f"{what:26} stock {costs[0]:>9}, fs {costs[1]:>9}, ratio {ratio(ours, stock)}")


def main(pairs: int) -> None:
    for part in (rows, variables, epochs):
        part(pairs)
        print(flush=True)
