"""Run the benchmarks, all or those named: `python -m benchmarks [step] [fixed] [start] [memory]`."""

import importlib
import os
import platform
import sys

NAMES = ("step", "fixed", "start", "memory")


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in NAMES]:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores", end=", ")
    import jax
    import keras

    print(f"Keras {keras.__version__}, JAX {jax.__version__}, {jax.default_backend()}")
    for name in names or NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"\n{module.__doc__.strip().splitlines()[0]}\n")
        module.main()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    sys.exit(main(sys.argv[1:]))
