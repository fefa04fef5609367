"""How long it takes to start: `import fitstep` over `import keras`, and `fitstep --help` (s)."""

import statistics
import subprocess
import sys
import time

TURNS = 7  # at most: a process takes seconds


def _seconds(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return time.perf_counter() - start


def main(pairs: int) -> None:
    programs = {
        "import keras": ("-c", "import keras"),
        "import fitstep, keras": ("-c", "import fitstep, keras; fitstep.fit"),
        "fitstep --help": ("-m", "fitstep", "--help"),
        "python -c pass": ("-c", "pass"),
    }
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(min(pairs, TURNS)):
        for name, command in programs.items():
            taken[name].append(_seconds(*command))
    for name, seconds in taken.items():
        print(f"{name:24} {statistics.median(seconds):.3f}")
    more = [
        a - b for a, b in zip(taken["import fitstep, keras"], taken["import keras"], strict=True)
    ]
    print(f"{'fitstep over keras':24} {statistics.median(more):.3f}  (bound 0.15)")
    print(f"{'bound of --help':24} 0.300")
