"""A whole process (import, build, one short fit): CPU seconds beside stock, as ratios.

fitstep runs twice in a row with a cache of compiled programs that is new in each turn, as on a
machine that sees the program for the first and the second time. Stock Keras has no such cache.
"""

import os
import statistics
import subprocess
import sys
import tempfile

from fitstep.records._timings import ratio

TURNS = 3  # at most: a process takes seconds
BOUNDS = {"MLP": 0.75, "CNN": 0.55, "Transformer": 0.50}  # of the second run
_PROGRAM = """
import sys
if sys.argv[1] == "fs":
    import fitstep as fs
from fitstep.cli._cases import cases
case = next(case for case in cases() if case.name.startswith(sys.argv[2])).cut(20)
model = case.build()
fit = model.fit if sys.argv[1] == "stock" else lambda *a, **k: fs.fit(model, *a, **k)
fit(case.x, case.y, batch_size=case.batch_size, epochs=2, verbose=0)
"""


def cpu_seconds(side: str, name: str, cache: str) -> float:
    """Of one process and what it starts."""
    environment = os.environ | {"XDG_CACHE_HOME": cache, "KERAS_BACKEND": "jax"}
    environment.pop("FITSTEP_CACHE", None)
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, side, name], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the process of {side} with the {name} failed: see above")
    return usage.ru_utime + usage.ru_stime


def main(pairs: int) -> None:
    turns = min(pairs, TURNS)
    print(f"medians of {turns}; CPU seconds of all threads")
    print("| model | stock | fs, first run | fs, second run | first / stock | second / stock |")
    print("|---|---|---|---|---|---|")
    for name, bound in BOUNDS.items():
        taken: dict[str, list[float]] = {"stock": [], "first": [], "second": []}
        for _ in range(turns):
            with tempfile.TemporaryDirectory() as cache:
                taken["stock"].append(cpu_seconds("stock", name, cache))
                taken["first"].append(cpu_seconds("fs", name, cache))
                taken["second"].append(cpu_seconds("fs", name, cache))
        second = ratio(taken["second"], taken["stock"])
        cells = [f"{statistics.median(seconds):.2f}" for seconds in taken.values()]
        cells += [str(ratio(taken["first"], taken["stock"])), second.against(bound)]
        print(f"| {' | '.join([name, *cells])} |", flush=True)
