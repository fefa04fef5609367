"""Runs Keras's own tests on Keras's trainer and on fitstep's, and compares the two.

    python tests/conformance/run.py [FILE ...] [--tests-from FOLDER] [--fresh]

What passes on Keras's trainer has to pass on fitstep's, but for the tests that `differences.py`
lists with a reason; what is listed there must not pass. The many tests that fail on both (most
want TensorFlow, which nobody needs here) say nothing.

The result for Keras's trainer is kept in the virtual environment until a package in it, a test
file, or the plugin changes, so that a second run takes half the time. Both results are left there
as JSON beside pytest's full output, in `.conformance/`.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from differences import DIFFERENCES

HERE = Path(__file__).resolve().parent

# Folders and files below `keras/src`. These are the ones whose tests train, evaluate, predict,
# build, save or load models.
SUITES = (
    "trainers",
    "backend/jax/trainer_test.py",
    "callbacks",
    "models",
    "saving",
    "distillation",
)
SECONDS_PER_TEST = 300  # the slowest takes 20 s on two cores; one that hangs is ended and named


class Result(NamedTuple):
    """What became of one test."""

    outcome: str
    error: str
    seconds: float


class Suite(NamedTuple):
    """The results of one run by test, how long it took, and whether pytest came to its end."""

    results: dict[str, Result]
    seconds: float
    finished: bool

    def passed(self) -> set[str]:
        return {test for test, result in self.results.items() if result.outcome == "passed"}


def main(arguments: list[str] | None = None) -> int:
    """Runs both suites and prints the comparison; 0 when there is nothing to complain about."""
    options = _parse(arguments)
    own = _tests_of(_installed_keras())
    tests = _tests_of(options.tests_from) if options.tests_from else own
    if tests is None:
        where = options.tests_from or "The installed Keras"
        print(f"{where} has no tests. Give --tests-from the folder of a Keras release, which has.")
        return 2
    files = _select(tests, options.files)
    if not files:
        print(f"No test file of Keras matches {' '.join(options.files)}.")
        return 2
    print(_versions(), f"{len(files)} files of Keras's tests", sep=", ", flush=True)
    store = _store()
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        # Files from elsewhere are linked into a folder that is no package, or Python would look
        # for them in the Keras that is installed.
        root = tests if tests == own else _link(tests, files, Path(scratch) / "tests")
        kept = store / f"stock-{_key(tests, files)}.json"
        stock = None if options.fresh else _load(kept)
        if stock is None:
            stock = _run("stock", root, files, Path(scratch), store)
            if not stock.finished or not stock.passed():
                print(f"Keras's tests did not run on Keras's trainer: see {store / 'stock.log'}")
                return 2
            _save(stock, kept)
        else:
            _print_suite("stock", stock, "from an earlier run")
        ours = _run("fitstep", root, files, Path(scratch), store)
        _save(ours, store / "fitstep.json")
    complaints = compare(stock, ours, DIFFERENCES)
    if ours.results:
        _print_complaints(complaints)
    if complaints:
        _print_log(store / "fitstep.log", lines=0 if ours.results else 10)
    print(f"{len(stock.passed() & ours.passed())} passed, {len(complaints)} failed")
    return 1 if complaints else 0


def compare(stock: Suite, ours: Suite, differences: dict[str, str]) -> dict[str, str]:
    """What is wrong, by test: differences that nobody listed, and a list that isn't true."""
    complaints = {}
    for test in sorted(stock.passed() - ours.passed() - differences.keys()):
        result = ours.results.get(test)
        complaints[test] = _explain(test, result, ours)
    ran = {test.partition("::")[0] for test in stock.results if "::" in test}
    for test in differences:
        if test in ours.passed():
            complaints[test] = "passes: take it out of differences.py"
        elif test not in stock.results and test.partition("::")[0] in ran:
            complaints[test] = "is listed in differences.py, but Keras has no such test"
    return complaints


def _explain(test: str, result: Result | None, ours: Suite) -> str:
    if result is None:
        reason = ours.results.get(test.partition("::")[0])
        return reason.error if reason else "not collected"
    if result.outcome == "started":
        return "the process ended during this test"
    if result.outcome == "collected":
        return "not run: the process had ended"
    return result.error or result.outcome


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="only test files whose path below keras/src begins with this, e.g. callbacks",
    )
    parser.add_argument(
        "--tests-from",
        type=Path,
        metavar="FOLDER",
        help="take the test files from another Keras, e.g. a site-packages folder or an unpacked "
        "wheel, and run them on the installed one",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="run Keras's trainer too, even if its result is kept"
    )
    return parser.parse_args(arguments)


# --- which tests ------------------------------------------------------------------------------


def _installed_keras() -> Path:
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        raise SystemExit("Keras is not installed in this Python environment.")
    return Path(spec.origin).parent


def _tests_of(folder: Path) -> Path | None:
    """The `src` folder of the Keras in or at `folder`, if it has tests."""
    for candidate in (folder, folder / "src", folder / "keras" / "src"):
        if (candidate / "trainers" / "trainer_test.py").is_file():
            return candidate.resolve()
    return None


def _select(tests: Path, prefixes: list[str]) -> list[str]:
    """The test files of the suites, relative to `tests`, that begin with one of `prefixes`."""
    found: list[Path] = []
    for suite in SUITES:
        path = tests / suite
        found += sorted(path.rglob("*_test.py")) if path.is_dir() else [path]
    names = [path.relative_to(tests).as_posix() for path in found if path.is_file()]
    return [name for name in names if not prefixes or name.startswith(tuple(prefixes))]


def _link(tests: Path, files: list[str], into: Path) -> Path:
    for file in files:
        (into / file).parent.mkdir(parents=True, exist_ok=True)
        (into / file).symlink_to(tests / file)
    return into


# --- one run ----------------------------------------------------------------------------------


def _run(name: str, root: Path, files: list[str], scratch: Path, store: Path) -> Suite:
    """Runs the test files in a process of their own, far from this project's pytest settings."""
    home = scratch / name  # working folder and Keras's settings: both leave files behind
    home.mkdir()
    events, log = home / "events.jsonl", store / f"{name}.log"
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider"),
                *("-c", os.devnull, "--rootdir", str(root), "-W", "default", "-ra"),
                *("--import-mode", "importlib", "--continue-on-collection-errors"),
                *("-o", f"faulthandler_timeout={SECONDS_PER_TEST}"),
                *("-o", "faulthandler_exit_on_timeout=true"),
                *(str(root / file) for file in files),
            ],
            cwd=home,
            env=_environment(name, home, events),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,  # it fails in any case: see the module's docstring
        )
    suite = _read(events, time.perf_counter() - began)
    _print_suite(name, suite, f"{suite.seconds:.0f} s")
    return suite


def _environment(name: str, home: Path, events: Path) -> dict[str, str]:
    theirs = ("KERAS_", "JAX_", "PYTEST_", "PYTHONWARNINGS", "XLA_FLAGS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(theirs)}
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "KERAS_HOME": str(home / "keras"),
        "FITSTEP_CACHE": "0",
        "FITSTEP_CONFORMANCE": name,
        "FITSTEP_CONFORMANCE_RESULTS": str(events),
    }


def _read(events: Path, seconds: float) -> Suite:
    results: dict[str, Result] = {}
    finished = False
    lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    for line in map(json.loads, lines):
        if line["test"]:
            results[line["test"]] = Result(line["outcome"], line["error"], line["seconds"])
        finished = line["outcome"] == "finished"
    return Suite(results, seconds, finished)


# --- what is kept -----------------------------------------------------------------------------


def _store() -> Path:
    """Inside the virtual environment if there is one, so that it goes when that goes."""
    if sys.prefix == sys.base_prefix:
        return Path(tempfile.mkdtemp(prefix="conformance-"))
    folder = Path(sys.prefix) / ".conformance"
    folder.mkdir(exist_ok=True)
    return folder


def _key(tests: Path, files: list[str]) -> str:
    """Changes with everything that the result for Keras's trainer depends on."""
    packages = sorted(
        f"{package.name}=={package.version}"
        for package in importlib.metadata.distributions()
        if package.name != "fitstep"
    )
    digest = hashlib.sha256(repr((sys.version, packages, files)).encode())
    digest.update((HERE / "plugin.py").read_bytes())
    for file in files:
        digest.update((tests / file).read_bytes())
    return digest.hexdigest()[:16]


def _save(suite: Suite, path: Path) -> None:
    """Writes the whole file or none of it."""
    content = {
        "versions": _versions(),
        "seconds": round(suite.seconds, 1),
        "finished": suite.finished,
        "tests": {test: result._asdict() for test, result in sorted(suite.results.items())},
    }
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
    draft.replace(path)


def _load(path: Path) -> Suite | None:
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    results = {test: Result(**result) for test, result in content["tests"].items()}
    return Suite(results, content["seconds"], content["finished"])


# --- what is printed --------------------------------------------------------------------------


def _versions() -> str:
    def version(*names: str) -> str:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "?"

    keras = version("keras", "keras-nightly")
    return f"Keras {keras}, JAX {version('jax')}, Python {platform.python_version()}"


def _print_suite(name: str, suite: Suite, note: str) -> None:
    total = sum("::" in test for test in suite.results)
    ending = "" if suite.finished else "; pytest did not come to its end"
    print(f"{name:8} {len(suite.passed()):4} of {total} tests pass ({note}){ending}", flush=True)


def _print_complaints(complaints: dict[str, str]) -> None:
    if DIFFERENCES:
        print(f"{len(DIFFERENCES)} known differences are listed in differences.py")
    for test, error in complaints.items():
        print(f"  {test}\n      {error[:200]}")


def _print_log(log: Path, lines: int) -> None:
    """Names the log and, where pytest did not get as far as any test, prints its end."""
    print(f"pytest's full output: {log}")
    for line in log.read_text(encoding="utf-8").splitlines()[-lines:] if lines else ():
        print(f"  {line}")


if __name__ == "__main__":
    raise SystemExit(main())
