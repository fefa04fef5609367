"""A pytest plugin that runs Keras's own tests with fitstep's trainer in place of Keras's.

Keras's wheel ships its test files. They take the trainer from two places: some subclass the class
that `keras.src.backend.jax.trainer` holds, the others build `keras.Model`, `Sequential` and
`Functional` models. Both are pointed at `fitstep.Trainer` here, before the first test file is
imported. Nothing of Keras is copied, and nothing in its folder is written to.

`run.py` beside this file is the usual way in. By hand, with this folder in PYTHONPATH:

    python -m pytest -p plugin -c /dev/null -W default .../keras/src/trainers/trainer_test.py

Environment:
    FITSTEP_CONFORMANCE=stock      substitute nothing: how Keras's trainer does on Keras's tests
    FITSTEP_CONFORMANCE_TRAINER    the class to substitute, `module:Class` (`fitstep:Trainer`)
    FITSTEP_CONFORMANCE_RESULTS    a file that gets one line of JSON per event, as it happens
"""

import importlib
import json
import os
import sys
import time
import types
from pathlib import Path

# Read when Keras and JAX are first imported, so set before that. The sharding tests want devices.
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

import pytest  # noqa: E402 - pytest plugins may import JAX


def pytest_configure(config: pytest.Config) -> None:
    """Prepares what Keras's test files expect around them, then substitutes the trainer."""
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: set by Keras's test files")
    sys.modules["conftest"] = _conftest()
    from keras.src.backend.jax import trainer as home

    # The test files of a release may run on a later Keras, where the class has lost its prefix.
    stock = home.__dict__.get("JAXTrainer") or home.__dict__["Trainer"]
    home.__dict__["JAXTrainer"] = stock
    if os.environ.get("FITSTEP_CONFORMANCE") != "stock":
        wanted = os.environ.get("FITSTEP_CONFORMANCE_TRAINER", "fitstep:Trainer")
        module, _, name = wanted.partition(":")
        substitute(stock, getattr(importlib.import_module(module), name))
    if results := os.environ.get("FITSTEP_CONFORMANCE_RESULTS"):
        config.pluginmanager.register(Recorder(Path(results)))


def substitute(stock: type, ours: type) -> None:
    """Puts `ours`, a subclass of Keras's trainer `stock`, wherever Keras uses `stock`."""
    import keras
    from keras.src.backend.jax import trainer as home
    from keras.src.models import model

    if ours is stock or not issubclass(ours, stock):
        raise pytest.UsageError(f"{ours!r} is not a subclass of Keras's trainer, {stock!r}")
    # `class Model(Trainer, keras.Model)` has no method resolution order any more once keras.Model
    # has the same mixin for a base. The mixin is redundant there by then, so it goes first.
    for mixed in ours.__subclasses__():
        if issubclass(mixed, keras.Model):
            mixed.__bases__ = tuple(base for base in mixed.__bases__ if base is not ours)
    keras.Model.__bases__ = tuple(ours if b is stock else b for b in keras.Model.__bases__)
    # The names under which test files, and `Model.__init__`, look the class up.
    for namespace in (home.__dict__, model.__dict__):
        for name in [name for name, value in namespace.items() if value is stock]:
            namespace[name] = ours


def _conftest() -> types.ModuleType:
    """Stands in for the `conftest` of Keras's repository, which the wheel does not ship."""

    def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(backend == "jax", reason=reason)

    module = types.ModuleType("conftest")
    module.__dict__["skip_if_backend"] = skip_if_backend
    return module


class Recorder:
    """Writes each event when it happens, so that even a crash of the process has a culprit.

    A line is `{"test": id, "outcome": ..., "error": first line, "seconds": ...}`. The outcomes of
    a test are `collected`, `started`, then `passed`, `failed` or `skipped`; the last one counts. A
    file that can't be imported fails under its own name. `finished`, without a test, comes last.
    """

    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")
        self._outcome, self._error, self._began = "", "", 0.0

    def _write(self, test: str, outcome: str, error: str = "", seconds: float = 0.0) -> None:
        line = {"test": test, "outcome": outcome, "error": error, "seconds": round(seconds, 3)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", f"not imported: {_first_line(report)}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._write(item.nodeid, "collected")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._error, self._began = "passed", "", time.perf_counter()
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # One report each for set-up, call and tear-down: a failure in any is the test's outcome.
        if self._outcome != "failed" and not report.passed:
            self._outcome, self._error = report.outcome, _first_line(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = time.perf_counter() - self._began
        self._write(nodeid, self._outcome, self._error, seconds)

    def pytest_sessionfinish(self) -> None:
        self._write("", "finished")


def _first_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The one line that says most: the exception's message, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return crash.message.strip().partition("\n")[0]
    lines = str(report.longrepr or "").strip().splitlines() or [""]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines)[-1]
