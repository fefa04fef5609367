"""The command line: what it prints, how it refuses, and what it leaves behind."""

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fitstep.cli import main
from fitstep.cli._flags import UsageError, flags_of, parse

TOY = '''"""A line through points."""
from dataclasses import dataclass, field

import keras
import numpy as np

import fitstep as fs


@dataclass(frozen=True)
class Config:
    epochs: int = field(default=2, metadata={"help": "passes, 100% of the rows each"})
    seed: int = 0
    fail: str = ""


class Failing(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if str(epoch) == self.epoch:
            raise RuntimeError("planned")


def one(config):
    keras.utils.set_random_seed(config.seed)
    x = np.linspace(-1, 1, 40, dtype="float32")[:, None]
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return fs.Run(model, x, 2 * x, validation_data=(x, 2 * x), test_data=(x, 2 * x),
                  epochs=config.epochs, callbacks=[Failing(config.fail)])


def build(config):
    return one(config)
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder; what loading an experiment does to Python is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("_fitstep_experiment_"):
            del sys.modules[name]


def experiment(folder: Path, text: str, name: str = "toy.py") -> str:
    """Write an experiment's file and return its name."""
    (folder / name).write_text(text)
    return name


def refused(capsys, *arguments: str) -> str:
    """Run the command, check that it refuses in one line, and return that line."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# --- without an experiment --------------------------------------------------------------------


def test_help_imports_no_heavy_package_and_is_quick():
    """`fitstep --help` takes under 0.3 s of CPU and imports no Keras, JAX, NumPy, pandas, rich."""
    program = (
        "import sys; from fitstep.cli import main; code = main(['--help']); "
        "print(code, sorted({'keras', 'jax', 'numpy', 'pandas', 'rich'} & set(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "train" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 []"
    # CPU seconds, because the wall clock belongs to whatever else the machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_module_and_version():
    """`python -m fitstep --version` prints the name and the version."""
    done = subprocess.run(
        [sys.executable, "-m", "fitstep", "--version"], capture_output=True, text=True, check=True
    )
    import fitstep

    assert done.stdout == f"fitstep {fitstep.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which command?"),
        (["trian"], "unknown command 'trian'. Did you mean train?"),
        (["dance"], "unknown command 'dance'. There are: train"),
        (["--verison"], "unrecognized arguments: --verison"),
        (["train"], "which experiment? Give a Python file, or a built-in one: credit"),
        (["train", "--seed", "1"], "which experiment? Give a Python file before --seed"),
        (["train", "crdit"], "(did you mean credit?)"),
        (["train", "xyz"], "Give a Python file, or one of: credit"),
        (["train", "nowhere.py"], "the file nowhere.py does not exist"),
        (["train", "./folder"], "the file ./folder is a folder"),
        (["train", "toy"], "Did you mean toy.py?"),
    ],
)
def test_usage_errors(here, capsys, arguments, said):
    """What is missing or mistyped is said in one line, with what there is instead."""
    (here / "folder").mkdir()
    experiment(here, TOY)
    assert said in refused(capsys, *arguments)


def test_train_help_lists_built_in_experiments(capsys):
    """`fitstep train --help` lists the built-in experiments without importing them."""
    assert main(["train", "--help"]) == 0
    assert "credit          Who gets a loan?" in capsys.readouterr().out


def test_missing_extra_is_named_with_the_line_that_installs_it(here, capsys, monkeypatch):
    """Without the packages of a built-in experiment nothing is trained and the remedy is given."""
    monkeypatch.delitem(sys.modules, "fitstep.experiments.credit", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    said = refused(capsys, "train", "credit")
    assert "needs the package 'sklearn'" in said
    assert 'pip install "fitstep[demo]"' in said
    assert list(here.iterdir()) == []


# --- flags ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flags:
    data: str
    count: int = 3
    rate: float = 1e-3
    fast: bool = False
    kind: Literal["sgd", "adam"] = "sgd"
    power: Literal[1, 2] | None = None
    limit: int | None = None
    long_name: str = "x"
    shape: tuple[int, ...] = (1, 2)
    made: list[int] = field(default_factory=lambda: [1])


def parsed(*tokens: str) -> dict:
    """Read flags of `Flags`, its required one given."""
    return parse(["--data", "d", *tokens], flags_of(Flags))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["--count", "5"], {"count": 5}),
        (["--count=-5"], {"count": -5}),
        (["--rate", "-1e-3"], {"rate": -1e-3}),
        (["--rate", "1", "--rate", "2"], {"rate": 2.0}),
        (["--fast"], {"fast": True}),
        (["--no-fast"], {"fast": False}),
        (["--kind", "adam"], {"kind": "adam"}),
        (["--power", "2"], {"power": 2}),
        (["--power", "none"], {"power": None}),
        (["--limit", "None"], {"limit": None}),
        (["--limit", "7"], {"limit": 7}),
        (["--long-name", "a b"], {"long_name": "a b"}),
        (["--long_name=--x=y"], {"long_name": "--x=y"}),
        (["--long-name", "-dash"], {"long_name": "-dash"}),
    ],
)
def test_typed_flags(tokens, expected):
    """Flags are read by the type of their field, in either spelling; the last one wins."""
    assert parsed(*tokens) == {"data": "d"} | expected


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["--count", "ten"], "--count expects an integer. Received: 'ten'"),
        (["--count", "1.5"], "--count expects an integer. Received: '1.5'"),
        (["--rate", "fast"], "--rate expects a number. Received: 'fast'"),
        (["--count"], "--count expects an integer. Received: nothing"),
        (["--count", "--fast"], "--count expects an integer. Received: nothing"),
        (["--fast=yes"], "--fast takes no value: write --fast or --no-fast. Received: --fast=yes"),
        (["--kind", "rmsprop"], "--kind expects one of sgd, adam. Received: 'rmsprop'"),
        (["--power", "3"], "--power expects one of 1, 2 or none. Received: '3'"),
        (["--limit", "x"], "--limit expects an integer or none. Received: 'x'"),
        (["--long-nam", "x"], "unknown flag --long-nam. Did you mean --long-name?"),
        (["--zzzzz", "x"], "unknown flag --zzzzz. There are: --data, --count"),
        (["5"], "unexpected argument '5': a value follows its flag"),
        (["--shape", "1"], "--shape cannot be set from the command line: its type tuple[int, ...]"),
    ],
)
def test_flag_errors_name_flag_expected_and_received(tokens, said):
    """A wrong flag or value is refused with the flag's name, what it expects and what came."""
    with pytest.raises(UsageError) as caught:
        parsed(*tokens)
    assert str(caught.value).startswith(said)


def test_required_flag():
    """A field without a default must be given."""
    with pytest.raises(UsageError, match=r"--data is missing: .* Give --data and text"):
        parse([], flags_of(Flags))


def test_experiment_help_shows_types_defaults_and_help(here, capsys):
    """`fitstep train FILE --help` describes the fields of its Config and trains nothing."""
    assert main(["train", experiment(here, TOY), "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "A line through points." in out
    assert "--epochs INT passes, 100% of the rows each (int, default: 2)" in out
    assert "--fail STR (str, default: '')" in out
    assert "--out DIR" in out
    assert not (here / "runs").exists()


def test_field_that_clashes_with_out(here, capsys):
    """A field that would take one of the command's own flags is refused with the remedy."""
    text = TOY.replace("seed: int", "out: int")
    said = refused(capsys, "train", experiment(here, text))
    assert "the field `out` of `Config` in toy.py would be the flag --out" in said


# --- experiment files -------------------------------------------------------------------------

CONFIG = (
    "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n    a: int = 1\n"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(config): pass", "toy.py has no `Config`: define it as `@dataclass(frozen"),
        ("class Config: pass", "`Config` in toy.py is not a dataclass"),
        (CONFIG.replace("(frozen=True)", ""), "`Config` in toy.py is not frozen"),
        (CONFIG, "toy.py has no `build`: define `def build(config)`"),
        (CONFIG + "build = 3", "`build` in toy.py is not a function"),
        (CONFIG + "build = print\nreport = 3", "`report` in toy.py is not a function"),
        (CONFIG + "def build(config): pass", "Received: NoneType. Is a `return` missing?"),
        (CONFIG + "def build(config): return {}", "Received: an empty dict"),
        (CONFIG + "def build(config): return {'a': 3}", "Received: 'a' -> int"),
        (CONFIG + "def build(config): return {'a': dict}", "for 'a' must return an fs.Run"),
        (CONFIG + "def build(config): return {'../a': dict}", "Received: '../a'"),
        (
            CONFIG + "def build(config): return {'': dict}",
            "a run's name in toy.py becomes a folder",
        ),
        (CONFIG + "def build(config): return {'model.keras': dict}", "must not look like a file"),
        (CONFIG + "def build(config): return {'A': dict, 'a': dict}", "Received: 'A' and 'a'"),
    ],
)
def test_experiment_errors(here, capsys, text, said):
    """What an experiment file lacks is said in one line, and no folder is left."""
    # `{'a': dict}`: called without arguments, `dict` returns something that is no Run.
    code = main(["train", experiment(here, text)])
    assert code == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (here / "runs").exists()


def test_exception_in_build_keeps_the_users_traceback_only(here, capsys):
    """An exception in `build` shows the user's own frames, exits with 1 and leaves no folder."""
    text = CONFIG + "def build(config):\n    return {}['missing']\n"
    assert main(["train", experiment(here, text)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f'Traceback (most recent call last):\n  File "{here / "toy.py"}"')
    assert err.rstrip().endswith("KeyError: 'missing'")
    assert "fitstep" not in err.replace(str(here), "")
    assert not (here / "runs").exists()


def test_exception_in_the_step_keeps_the_users_traceback_only(here, capsys):
    """An exception in `train_step` shows no frame of the engine and leaves no folder."""
    text = TOY.replace(
        "    model = keras.Sequential([",
        "    class Own(keras.Sequential):\n"
        "        def train_step(self, state, data):\n"
        "            raise LookupError('my own mistake')\n\n"
        "    model = Own([",
    )
    assert main(["train", experiment(here, text)]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f'Traceback (most recent call last):\n  File "{here / "toy.py"}"')
    assert "LookupError: my own mistake" in err
    assert "engine" not in err
    assert "No epoch was over yet: nothing is kept." in out
    assert not (here / "runs").exists()


def test_syntax_error_shows_file_and_line(here, capsys):
    """A syntax error is told with the user's file and line and without a frame of fitstep."""
    assert main(["train", experiment(here, "x = 1\ndef f(:\n")]) == 1
    err = capsys.readouterr().err
    assert f'File "{here / "toy.py"}", line 2' in err
    assert "SyntaxError" in err
    assert "_experiment.py" not in err


def test_file_beside_the_experiment_and_a_clashing_name(here, capsys):
    """An experiment imports the files beside it, and may bear the name of a package."""
    (here / "neighbour_of_toy.py").write_text("SIZE = 4\n")
    text = "import json\nfrom neighbour_of_toy import SIZE\n" + CONFIG + "    size: int = SIZE\n"
    name = experiment(here, text + "build = print\n", name="json.py")
    assert main(["train", name, "--help"]) == 0
    assert "--size INT  (int, default: 4)" in capsys.readouterr().out.replace("   ", "  ")
    assert sys.modules["json"] is json


# --- training ---------------------------------------------------------------------------------


def test_runs_are_built_when_their_turn_comes_and_reported(here, capsys):
    """Functions in the dict are called one by one; the report is printed and stored."""
    text = TOY.replace(
        "    return one(config)\n",
        "    log = []\n"
        "    def lazily(name):\n"
        "        print('built', name)\n"
        "        return one(config)\n"
        "    return {name: (lambda name=name: lazily(name)) for name in ('a', 'b')}\n\n"
        "def report(config, results):\n"
        "    return [{'run': name, 'loss': result.history['loss'][-1], 'test': result.test['loss']}\n"
        "            for name, result in results.items()]\n",
    )
    assert main(["train", experiment(here, text), "--epochs", "1", "--out", "out"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    said = [out.index(part) for part in ("built a", "a: 1 epoch", "built b", "b: 1 epoch")]
    assert said == sorted(said)
    summary = json.loads((here / "out" / "summary.json").read_text())
    assert [row["run"] for row in summary["report"]] == ["a", "b"]
    assert summary["report"][0]["test"] == summary["runs"]["a"]["test"]["loss"]
    assert f"a    {summary['report'][0]['loss']:.4f}" in out
    assert sorted(path.name for path in (here / "out" / "a").iterdir()) == [
        "curves.png",
        "history.jsonl",
        "model.keras",
        "summary.json",
    ]


def test_report_of_another_kind(here, capsys):
    """A report that is no list of dicts is named, and the training is kept."""
    text = TOY + "\ndef report(config, results):\n    return 'fine'\n"
    assert main(["train", experiment(here, text), "--epochs", "1", "--out", "out"]) == 2
    assert "must return a list of dicts" in capsys.readouterr().err
    assert (here / "out" / "model.keras").exists()
    assert json.loads((here / "out" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_what_there_is(here, number):
    """Ctrl-C and SIGTERM end a run with 128 and their number, and what was trained is kept."""
    import keras

    # A background job of a shell, and so this test in one, inherits an ignored SIGINT.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from fitstep.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["train", experiment(here, TOY), "--epochs", "1000000", "--out", "out"]
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        for line in child.stdout:
            if "epoch 1/" in line:
                break
        child.send_signal(number)
        rest = child.stdout.read()
    assert child.returncode == 128 + number
    assert "Interrupted. Kept in out: histories, curves and models (run stopped after" in rest
    summary = json.loads((here / "out" / "summary.json").read_text())
    history = (here / "out" / "history.jsonl").read_text().splitlines()
    assert summary["status"] == "interrupted"
    assert summary["epochs"] == len(history)
    model: Any = keras.models.load_model(here / "out" / "model.keras")
    assert model.count_params() == 2
