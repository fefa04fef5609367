"""Beside PyTorch: fs.fit, a raw PyTorch loop and Lightning's trainer on equal models (us/step).

PyTorch runs in a process of its own, which the variable FITSTEP_TORCH_PYTHON names and which waits
while fs.fit runs here: epochs take turns, so both meet the same noise, but each keeps its own
threads, memory and caches. All shuffle, use Adam and float32, and start from the same weights.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

import fitstep as fs
from fitstep.cli._cases import Case, cases
from fitstep.records._timings import interleaved, microseconds, ratio

VARIABLE = "FITSTEP_TORCH_PYTHON"
LOOPS = {"raw": "raw loop", "fused": "raw loop, fused Adam", "lightning": "Lightning, fused Adam"}
TOLERANCE = 1e-4  # of the loss after 16 steps; another library sums in another order
Ask = Callable[[str], float]


def chosen() -> dict[str, Case]:
    return {case.name.split()[0]: case for case in cases() if case.name.startswith(("MLP", "CNN"))}


@contextmanager
def torch_process(python: str) -> Iterator[tuple[dict[str, Any], Ask]]:
    """What it says of itself, and the function that has it run one epoch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, case in chosen().items():
            weights = [np.asarray(v.value) for v in case.build().trainable_variables]
            named = {f"weight {i}": weight for i, weight in enumerate(weights)}
            np.savez(folder / title, x=case.x, y=case.y, batch_size=case.batch_size, **named)
        script = Path(__file__).with_name("torch_peer.py")
        # An own folder, since Lightning may write into the present one. No PYTHONPATH: that is ours.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with (folder / "errors").open("w+") as errors:
            process = subprocess.Popen(
                [python, str(script), name, str(os.cpu_count())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=name,
                env=environment,
            )
            assert process.stdin is not None
            assert process.stdout is not None

            def answer() -> str:
                line = process.stdout.readline()
                if not line:
                    errors.seek(0)
                    raise RuntimeError(f"{python} ended: {errors.read()[-2000:]}")
                return line

            def ask(loop: str) -> float:
                print(loop, file=process.stdin, flush=True)
                return float(answer())

            try:
                yield json.loads(answer()), ask
            finally:
                process.stdin.close()
                process.wait()


def check(title: str, case: Case, ask: Ask) -> None:
    """PyTorch computes what stock `fit` does: 16 steps, without shuffling and Dropout."""
    model, few = case.build(), case.cut(16)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    options = {"batch_size": case.batch_size, "shuffle": False, "verbose": 0}
    expected = model.fit(few.x, few.y, **options).history["loss"][-1]
    loss = ask(f"check {title}")
    assert abs(loss - expected) <= TOLERANCE * expected, (title, loss, expected)


def main(pairs: int) -> None:
    python = os.environ.get(VARIABLE)
    if not python:
        print(f"left out: set {VARIABLE} to a Python that has torch, and lightning if you like")
        return
    with torch_process(python) as (about, ask):
        threads = ", ".join(f"{count} for the {name}" for name, count in about["threads"].items())
        print(f"torch {about['torch']}, the faster of 1 and all threads: {threads}", end="; ")
        print(f"JAX has {os.cpu_count()} cores")
        if not any(loop.startswith("lightning") for loop in about["loops"]):
            print("Lightning: left out, that Python does not have it")
        print("| model | loop | PyTorch | fs.fit | fs / PyTorch |")
        print("|---|---|---|---|---|")
        for title, case in chosen().items():
            check(title, case, ask)
            options = {"batch_size": case.batch_size, "verbose": 0}
            runs = {"fs": partial(fs.fit, case.build(), case.x, case.y, **options)}
            there = [loop for loop in LOOPS if f"{loop} {title}" in about["loops"]]
            runs |= {loop: partial(ask, f"{loop} {title}") for loop in there}
            seconds = interleaved(runs, pairs)
            for loop in there:
                costs = [f"{microseconds(seconds[side], case.steps):.0f}" for side in (loop, "fs")]
                over = str(ratio(seconds["fs"], seconds[loop]))
                print(f"| {case.name} | {LOOPS[loop]} | {' | '.join([*costs, over])} |", flush=True)
