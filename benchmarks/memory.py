"""Peak memory of a fit: fs.fit beside stock fit, and in numbers of states (MB).

A process each, whose peak Linux keeps in /proc (what `getrusage` tells begins with the parent's).
The state is 3 x 64 MB: weights and two moments of Adam.
"""

import subprocess
import sys

_PROGRAM = """
import pathlib, sys
import numpy as np
import fitstep as fs, keras
from keras import layers
def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
width = 2048
model = keras.Sequential([layers.Input((width,)), *[layers.Dense(width, "relu") for _ in range(4)]])
model.compile("adam", "mse")
x = np.ones((32, width), "float32")
model.optimizer.build(model.trainable_variables)
before = peak()
how = sys.argv[1]
if how == "stock":
    model.fit(x, x, batch_size=8, epochs=3, verbose=0)
else:
    fs.fit(model, x, x, batch_size=8, epochs=3, verbose=0, snapshot=how == "fs")
state = sum(v.value.nbytes for v in [*model.variables, *model.optimizer.variables])
print((peak() - before) / 1024, state / 2**20)
"""


def main(pairs: int) -> None:
    del pairs  # a peak is the same each time
    peaks = {}
    for how in ("stock", "fs", "fs without snapshot"):
        command = [sys.executable, "-c", _PROGRAM, how]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        peaks[how], state = float(out[-2]), float(out[-1])
        over = (peaks[how] - peaks["stock"]) / state
        print(f"{how:22} {peaks[how]:7.0f} MB over the built model, {over:+.2f} states over stock")
    print(f"one state is {state:.0f} MB; the bound is +1.00")
