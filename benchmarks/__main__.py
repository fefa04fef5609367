"""Run the benchmarks, all or those named: `python -m benchmarks [step] [growth] ... [--pairs N]`."""

import argparse
import importlib
import os
import platform
import sys

NAMES = (
    "step",
    "serve",
    "own_step",
    "steps",
    "peers",
    "growth",
    "process",
    "fixed",
    "start",
    "memory",
)
PAIRS = 15


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(NAMES)}")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"default {PAIRS}; 1 to try out")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.names if name not in NAMES]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    if asked.pairs < 1:
        parser.error(f"--pairs must be at least 1. Received: {asked.pairs}")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores", end=", ")
    import jax
    import keras

    print(f"Keras {keras.__version__}, JAX {jax.__version__}, {jax.default_backend()}", end=", ")
    print(f"{asked.pairs} interleaved pairs, load {os.getloadavg()[0]:.1f}")
    for name in asked.names or NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"\n## {name}: {module.__doc__.strip().splitlines()[0]}\n", flush=True)
        module.main(asked.pairs)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    sys.exit(main(sys.argv[1:]))
