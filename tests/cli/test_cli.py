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


@pytest.mark.parametrize("package", ["sklearn", "pandas", "matplotlib"])
def test_missing_extra_is_named_with_the_line_that_installs_it(here, capsys, monkeypatch, package):
    """Without one of a built-in experiment's packages nothing is trained and the remedy is given."""
    monkeypatch.delitem(sys.modules, "fitstep.experiments.credit", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(capsys, "train", "credit")
    assert f"needs the package {package!r}" in said
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
    assert "No epoch was over yet: no run folder is left." in out
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
    assert "Interrupted. Kept in out: what there was by then (run stopped after" in rest
    summary = json.loads((here / "out" / "summary.json").read_text())
    history = (here / "out" / "history.jsonl").read_text().splitlines()
    assert summary["status"] == "interrupted"
    assert summary["epochs"] == len(history)
    model: Any = keras.models.load_model(here / "out" / "model.keras")
    assert model.count_params() == 2


def with_hook(hook: str) -> str:
    """The toy experiment with a callback that does `hook` at the beginning of its second epoch."""
    return TOY.replace("if str(epoch) == self.epoch:", "if epoch == 1:").replace(
        'raise RuntimeError("planned")', hook
    )


def test_a_model_that_cannot_be_kept_is_no_success(here):
    """Where the trained model did not fit on the disk, the exit code and the summary say so."""
    experiment(here, TOY.replace("Dense(1)]", "Dense(3000), keras.layers.Dense(1000)]"))
    command = f"ulimit -f 1024; exec {sys.executable} -m fitstep train toy.py --out out"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "Kept in out, without model.weights.h5" in done.stdout
    summary = json.loads((here / "out" / "summary.json").read_text())
    assert summary["missing"] == ["model.weights.h5"]
    assert not [path.name for path in (here / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("where", ["build", "callback"])
def test_an_experiment_may_change_the_working_folder(here, where, tmp_path_factory):
    """The run folder is where it was asked for, whatever folder the experiment changes to."""
    change = f"__import__('os').chdir({str(tmp_path_factory.mktemp('elsewhere'))!r})"
    if where == "callback":
        text = with_hook(change)
    else:
        text = TOY.replace("    return one(config)", f"    {change}\n    return one(config)")
    experiment(here, text)
    assert main(["train", "toy.py", "--out", "out"]) == 0
    assert {"model.keras", "curves.png", "summary.json"} <= {
        path.name for path in (here / "out").iterdir()
    }
    assert json.loads((here / "out" / "summary.json").read_text())["status"] == "finished"


def test_a_value_in_another_encoding_is_kept_escaped(here):
    """A file name that is no UTF-8 goes into `config.json` as JSON can hold it."""
    experiment(here, TOY)
    name = os.fsdecode(b"caf\xe9")
    assert main(["train", "toy.py", "--fail", name, "--out", "out"]) == 0
    kept = json.loads((here / "out" / "config.json").read_text(encoding="utf-8"))
    assert kept["config"]["fail"] == name


@pytest.mark.parametrize("gone", ["absent", "closed"])
def test_without_standard_output_all_is_kept_and_errors_are_told(here, capsys, monkeypatch, gone):
    """A daemon has no standard output: the run is made in silence, a failure still speaks."""
    stream = None
    if gone == "closed":
        stream = (here / "stream").open("w")
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    experiment(here, TOY)
    assert main(["train", "toy.py", "--out", "out"]) == 0
    assert (here / "out" / "model.keras").exists()
    assert main(["train", "toy.py", "--fail", "0"]) == 1
    assert "RuntimeError: planned" in capsys.readouterr().err


def test_a_display_that_lacks_a_letter_trains(here):
    """On a terminal in ASCII the name of a run may hold other letters."""
    experiment(here, TOY.replace("    return one(config)", '    return {"ü": one(config)}'))
    done = subprocess.run(
        ["script", "-qec", f"{sys.executable} -m fitstep train toy.py --out out", "/dev/null"],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "TERM": "xterm"},
    )
    assert done.returncode == 0, done.stdout
    assert (here / "out" / "ü" / "model.keras").exists()


def test_a_name_of_too_many_bytes_is_refused_before_training(here, capsys):
    """Letters count as the bytes that a file system counts."""
    experiment(here, TOY.replace("    return one(config)", '    return {"字" * 90: one(config)}'))
    assert main(["train", "toy.py"]) == 2
    assert "becomes a folder" in capsys.readouterr().err


def test_a_forked_worker_dies_of_its_sigterm_as_ever():
    """Pools end their workers by SIGTERM, which means Ctrl-C only in the process of the command."""
    program = """
import os, signal, time
from fitstep.cli._signals import sigterm_as_ctrl_c
with sigterm_as_ctrl_c():
    ready, here = os.pipe()
    child = os.fork()
    if not child:
        os.write(here, b"!")
        time.sleep(60)
    os.read(ready, 1)  # a signal that comes before Python has dealt with the fork is dropped
    os.kill(child, signal.SIGTERM)
    print("ended by", os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"ended by {int(signal.SIGTERM)}\n"
    assert "KeyboardInterrupt" not in done.stderr


def test_sys_exit_in_a_callback_says_what_was_kept(here, capsys):
    """The exit code is the user's, and the last line tells of the folder."""
    experiment(here, with_hook("raise SystemExit(5)"))
    with pytest.raises(SystemExit) as caught:
        main(["train", "toy.py", "--out", "out"])
    assert caught.value.code == 5
    assert "Stopped by `sys.exit`. Kept in out" in capsys.readouterr().out


def test_what_is_no_field_and_no_experiment_is_named(here, capsys):
    """A setting without a type, and functions of the wrong shape, are told with the remedy."""
    cases = {
        "write `epochs: int = 5`": TOY.replace(
            'epochs: int = field(default=2, metadata={"help": "passes, 100% of the rows each"})',
            "epochs = 5",
        ),
        "`build` in toy.py takes `()`: define `def build(config)`": TOY.replace(
            "def build(config):", "def build():"
        ),
    }
    for said, text in cases.items():
        experiment(here, text)
        assert said in refused(capsys, "train", "toy.py")
    experiment(here, TOY)
    assert "--out expects a folder" in refused(capsys, "train", "toy.py", "--out", "")
