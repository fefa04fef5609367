"""An experiment: a Python file with a frozen dataclass `Config` and a function `build(config)`."""

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fitstep import experiments
from fitstep._errors import FitstepError
from fitstep._run import Run

SINGLE = "run"  # the name of a run where `build` returned one and not a dict
INSTALL_DEMO = 'pip install "fitstep[demo]"'

_LONGEST_NAME = 200  # bytes; most file systems take 255, and files are written beside it
_PLAIN = (bool, int, float, str, tuple)
Planned = Run | Callable[[], Run]


class ExperimentError(FitstepError, ValueError):
    """An experiment cannot be found, or its file lacks what `fitstep train` needs."""


@dataclass(frozen=True)
class Experiment:
    """A loaded experiment.

    Args:
        name: a built-in one's name, or the file's without `.py`.
        path: its file.
        about: the first line of its docstring.
        config_class: its frozen dataclass `Config`.
        build: `build(config)`.
        report: `report(config, results)`, or `None`.
        digest: SHA-256 of the file as it was loaded.
    """

    name: str
    path: Path
    about: str
    config_class: type
    build: Callable[[Any], Any]
    report: Callable[[Any, Mapping[str, Any]], Any] | None
    digest: str


def built_in() -> str:
    """The names of the built-in experiments, for a message."""
    return ", ".join(experiments.names())


def find(argument: str) -> Path:
    """The file of a built-in experiment, or of the path given.

    Raises:
        ExperimentError: if there is no such experiment and no such file.
    """
    if argument in experiments.names():
        return experiments.FOLDER / f"{argument}.py"
    path = Path(argument)
    if path.is_file():
        return path.resolve()
    if path.suffix == ".py" or path.name != argument:
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ExperimentError(f"the file {argument} {what}. Built-in experiments: {built_in()}")
    if Path(f"{argument}.py").is_file():
        raise ExperimentError(f"no built-in experiment {argument!r}. Did you mean {argument}.py?")
    close = difflib.get_close_matches(argument, experiments.names(), n=1)
    raise ExperimentError(
        f"no built-in experiment {argument!r}{f' (did you mean {close[0]}?)' if close else ''}. "
        f"Give a Python file, or one of: {built_in()}"
    )


def load(path: Path) -> Experiment:
    """Import an experiment's file and check what it defines.

    Raises:
        ExperimentError: if something is missing. Whatever the file itself raises passes through.
    """
    source = path.read_bytes()
    module = _import_built_in(path) if path.parent == experiments.FOLDER else execute(path, source)
    config_class, build = _config_class(module, path), _function(module, "build", path)
    report = _function(module, "report", path) if "report" in vars(module) else None
    about = (module.__doc__ or "").strip().partition("\n")[0]
    digest = hashlib.sha256(source).hexdigest()
    return Experiment(path.stem, path, about, config_class, build, report, digest)


def _import_built_in(path: Path) -> ModuleType:
    for package in experiments.REQUIRED:
        if importlib.util.find_spec(package) is None:
            raise ExperimentError(_needs(path, package))
    try:
        return importlib.import_module(f"{experiments.__name__}.{path.stem}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "fitstep", "keras", "jax", "numpy"):
            raise  # the installation is broken, not short of the extra
        raise ExperimentError(_needs(path, package)) from error


def _needs(path: Path, package: str) -> str:
    return (
        f"the built-in experiment {path.stem!r} needs the package {package!r}, which is not "
        f"installed. Install it: {INSTALL_DEMO}"
    )


def execute(path: Path, source: bytes) -> ModuleType:
    """Run a file as a module, with its folder on `sys.path`, as `python FILE` would."""
    # A name of its own: a file called keras.py must not stand in for Keras in `sys.modules`,
    # and dataclasses look their module up there.
    name = f"_fitstep_experiment_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None  # always so without a loader
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        # The file that the user asked to run; an import would leave a __pycache__ beside it.
        exec(compile(source, str(path), "exec"), vars(module))  # noqa: S102
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _config_class(module: ModuleType, path: Path) -> type:
    remedy = "define it as `@dataclass(frozen=True) class Config`, one field for each flag"
    config_class = vars(module).get("Config")
    if config_class is None:
        raise ExperimentError(f"{path.name} has no `Config`: {remedy}")
    if not (isinstance(config_class, type) and dataclasses.is_dataclass(config_class)):
        raise ExperimentError(f"`Config` in {path.name} is not a dataclass: {remedy}")
    if not vars(config_class)["__dataclass_params__"].frozen:
        raise ExperimentError(f"`Config` in {path.name} is not frozen: {remedy}")
    fields = {field.name for field in dataclasses.fields(config_class)}
    for name, value in vars(config_class).items():
        if isinstance(value, _PLAIN) and not name.startswith("_") and name not in fields:
            raise ExperimentError(
                f"`Config.{name}` in {path.name} has no type, so it is no field: write "
                f"`{name}: {type(value).__name__} = {value!r}`"
            )
    return config_class


def _function(module: ModuleType, name: str, path: Path) -> Callable[..., Any]:
    wanted = {
        "build": "`def build(config)`, returning one fs.Run or a dict of them by name",
        "report": "`def report(config, results)`, returning a list of dicts",
    }[name]
    if name not in vars(module):
        raise ExperimentError(f"{path.name} has no `{name}`: define {wanted}")
    if not callable(vars(module)[name]):
        raise ExperimentError(f"`{name}` in {path.name} is not a function: define {wanted}")
    signature = inspect.signature(vars(module)[name])
    try:
        signature.bind(*[None] * {"build": 1, "report": 2}[name])
    except TypeError:
        raise ExperimentError(
            f"`{name}` in {path.name} takes `{signature}`: define {wanted}"
        ) from None
    return vars(module)[name]


def planned_runs(built: Any, path: Path) -> dict[str, Planned]:
    """Check what `build` returned; a single run gets the name "run".

    Raises:
        ExperimentError: if it is neither a `Run` nor a dict of runs by fit names.
    """
    if isinstance(built, Run):
        return {SINGLE: built}
    wanted = "must return one fs.Run, or a dict: name -> fs.Run, or a function that returns one"
    if not isinstance(built, Mapping):
        hint = ". Is a `return` missing?" if built is None else ""
        raise ExperimentError(
            f"`build` in {path.name} {wanted}. Received: {type(built).__name__}{hint}"
        )
    if not built:
        raise ExperimentError(f"`build` in {path.name} {wanted}. Received: an empty dict")
    for name, planned in built.items():
        if not isinstance(planned, Run) and not callable(planned):
            raise ExperimentError(
                f"`build` in {path.name} {wanted}. Received: {name!r} -> {type(planned).__name__}"
            )
    _check_names(list(built), path)
    return dict(built)


def _check_names(names: list[Any], path: Path) -> None:
    """Each run gets a folder of its name, on systems too that take "A" and "a" for the same."""
    seen: dict[str, str] = {}
    for name in names:
        fits = isinstance(name, str) and re.fullmatch(r"\w[\w .,=+@-]{0,99}(?<![ .])", name)
        if not fits or len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
            raise ExperimentError(
                f"a run's name in {path.name} becomes a folder: use letters, digits, spaces and "
                f"`_-.,=+@` (100 at most, starting with a letter or digit). Received: {name!r:.120}"
            )
        if "." in name and Path(name).suffix in (".json", ".jsonl", ".keras", ".png"):
            raise ExperimentError(
                f"a run's name in {path.name} must not look like a file of the run folder. "
                f"Received: {name!r}"
            )
        if name.lower() in seen:
            raise ExperimentError(
                f"two runs in {path.name} have names that some systems take for the same folder. "
                f"Received: {seen[name.lower()]!r} and {name!r}"
            )
        seen[name.lower()] = name


def realise(name: str, planned: Planned, path: Path) -> Run:
    """The run itself, built now where `build` left that for later."""
    if isinstance(planned, Run):
        return planned
    run = planned()
    if not isinstance(run, Run):
        raise ExperimentError(
            f"the function that `build` in {path.name} gave for {name!r} must return an fs.Run. "
            f"Received: {type(run).__name__}"
        )
    return run
