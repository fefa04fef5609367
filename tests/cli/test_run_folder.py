"""The run folder and the console: what is written when, and what a failure can't take away."""

import errno
import io
import json
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import fitstep as fs
from fitstep.cli import main
from fitstep.records import _curves, _json
from fitstep.records._console import LiveConsole, PlainConsole, figures, open_console
from fitstep.records._recorder import SECONDS_BETWEEN_SAVES, Recorder
from fitstep.records._run_folder import RunFiles, RunFolderError, claim

NOW = datetime(2025, 1, 31, 12, 30, 5, tzinfo=UTC)

EXPERIMENT = """
from dataclasses import dataclass
import keras
import numpy as np
import fitstep as fs

@dataclass(frozen=True)
class Config:
    epochs: int = 3
    fail: int = -1

class Failing(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError("planned")

def build(config):
    keras.utils.set_random_seed(0)
    x = np.linspace(-1, 1, 40, dtype="float32")[:, None]
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return fs.Run(model, x, 2 * x, validation_data=(x, 2 * x), test_data=(x, 2 * x),
                  epochs=config.epochs, callbacks=[Failing(config.fail)])
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder with one experiment, `toy.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "toy.py").write_text(EXPERIMENT)
    yield tmp_path
    sys.modules.pop("_fitstep_experiment_toy", None)


def read(path: Path) -> dict:
    """The content of a JSON file."""
    return json.loads(path.read_text())


# --- claiming a folder ------------------------------------------------------------------------


def test_two_runs_in_one_second_get_different_folders(here):
    """The default folder bears the experiment's name and the time, numbered where it is taken."""
    paths = [claim(None, "toy", NOW).path for _ in range(3)]
    name = "toy-20250131T123005Z"
    names = [name, f"{name}-2", f"{name}-3"]
    assert paths == [here / "runs" / each for each in names]


def test_out_must_be_new_or_empty(here):
    """A folder with content is refused and left alone; an empty one is taken."""
    (here / "full").mkdir()
    (here / "full" / "thesis.tex").write_text("all of it")
    with pytest.raises(RunFolderError, match=r"new or empty. Received: --out=full.*thesis.tex"):
        claim("full", "toy", NOW)
    assert (here / "full" / "thesis.tex").read_text() == "all of it"
    (here / "empty").mkdir()
    assert claim("empty", "toy", NOW).path == here / "empty"


def test_one_empty_folder_is_given_to_one_run(here):
    """A folder that another run has claimed is refused although it looks empty."""
    claim("out", "toy", NOW)
    with pytest.raises(RunFolderError, match="another run has claimed out"):
        claim("out", "toy", NOW)


@pytest.mark.parametrize("out", ["toy.py", "toy.py/below"])
def test_a_folder_that_cannot_be_made(here, out):
    """Where no folder can be, the system's reason is told and nothing is left."""
    with pytest.raises(RunFolderError, match=f"cannot write to the run folder {out}: Not a dir"):
        claim(out, "toy", NOW)
    assert [path.name for path in here.iterdir()] == ["toy.py"]


def test_a_full_disk_is_found_when_the_folder_is_claimed(here, monkeypatch, capsys):
    """A disk without room for the claim ends the command before training, and leaves nothing."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(["train", "toy.py", "--out", "new/out"]) == 2
    assert "new/out: No space left on device" in capsys.readouterr().err
    assert not (here / "new").exists()


def test_room_for_the_model_is_checked_before_training(here, monkeypatch, capsys):
    """A disk without room for the trained model ends the command before its first step."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 500_000}))
    assert main(["train", "toy.py", "--out", "out"]) == 2
    assert "no room for the trained models in out" in capsys.readouterr().err
    assert not (here / "out").exists()


def test_discard_removes_what_was_made_and_nothing_else(here):
    """Giving a claim up removes the folders that were made for it, if they are empty."""
    (here / "old").mkdir()
    claim("old/a/b", "toy", NOW).discard()
    assert list((here / "old").iterdir()) == []
    folder = claim("old/a/b", "toy", NOW)
    (here / "old" / "a" / "note").write_text("mine")
    folder.discard()
    assert [path.name for path in (here / "old" / "a").iterdir()] == ["note"]


# --- a training run ---------------------------------------------------------------------------


def test_a_finished_run(here, capsys):
    """The folder holds the configuration, versions, history, curves, figures and trained model."""
    assert main(["train", "toy.py", "--epochs", "2", "--out", "out"]) == 0
    out = here / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "curves.png",
        "environment.json",
        "history.jsonl",
        "model.keras",
        "summary.json",
    ]
    assert read(out / "config.json")["config"] == {"epochs": 2, "fail": -1}
    assert read(out / "config.json")["experiment"] == "toy"
    assert read(out / "environment.json")["packages"]["keras"] == keras.__version__
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in history] == [1, 2]
    assert set(history[0]["logs"]) == {"loss", "mae", "val_loss", "val_mae"}
    summary = read(out / "summary.json")
    assert (summary["status"], summary["epochs"]) == ("finished", 2)
    assert summary["last"] == history[-1]["logs"]
    # Training and test rows are the same here, so the last validation is the test.
    assert summary["test"]["loss"] == pytest.approx(history[-1]["logs"]["val_loss"], rel=1e-6)
    x = np.linspace(-1, 1, 40, dtype="float32")[:, None]
    model: Any = keras.models.load_model(out / "model.keras")
    loss = float(np.mean((model.predict(x, verbose=0) - 2 * x) ** 2))
    assert summary["test"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "Kept in out" in capsys.readouterr().out


def test_a_run_that_fails_later_keeps_its_epochs(here, capsys):
    """After the first epoch a failure leaves the history, the model and the word "failed"."""
    assert main(["train", "toy.py", "--fail", "2", "--out", "out"]) == 1
    out, err = capsys.readouterr()
    assert "Kept in out: what there was by then (run stopped after 2 epochs)." in out
    assert err.rstrip().endswith("RuntimeError: planned")
    summary = read(here / "out" / "summary.json")
    assert (summary["status"], summary["epochs"]) == ("failed", 2)
    assert summary["error"] == "RuntimeError: planned"
    assert len((here / "out" / "history.jsonl").read_text().splitlines()) == 2
    model: Any = keras.models.load_model(here / "out" / "model.keras")
    assert model.count_params() == 2


def test_a_run_that_fails_at_once_leaves_nothing(here, capsys):
    """Before the first epoch is over a failure leaves no folder."""
    assert main(["train", "toy.py", "--fail", "0"]) == 1
    assert "No epoch was over yet: no run folder is left." in capsys.readouterr().out
    assert [path.name for path in here.iterdir()] == ["toy.py"]


def test_without_matplotlib_the_curves_are_skipped(here, capsys, monkeypatch):
    """Where Matplotlib is missing there is a note and no picture; all else is there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["train", "toy.py", "--epochs", "1", "--out", "out"]) == 0
    assert "curves.png is skipped: matplotlib" in capsys.readouterr().out
    assert not (here / "out" / "curves.png").exists()
    assert (here / "out" / "model.keras").exists()


# --- the files of a run -----------------------------------------------------------------------


def test_a_line_that_could_not_be_written_comes_with_the_next(tmp_path):
    """A disk that is full for a while costs no epoch of the history, and is told once."""
    told: list[str] = []
    files = RunFiles(tmp_path, told.append)
    (tmp_path / "history.jsonl").mkdir()  # in the way: appending fails
    files.append_epoch({"epoch": 1})
    files.append_epoch({"epoch": 2})
    (tmp_path / "history.jsonl").rmdir()
    files.append_epoch({"epoch": 3})
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
    assert len(told) == 1


def test_a_model_that_keras_cannot_save_keeps_its_weights(tmp_path):
    """Where a model has no configuration, its weights are saved and a note says why."""

    class Odd(keras.Sequential):
        def get_config(self):
            raise NotImplementedError("no configuration here")

    told: list[str] = []
    model = Odd([keras.Input((2,)), keras.layers.Dense(1)])
    RunFiles(tmp_path, told.append).save_model(model)
    assert [path.name for path in tmp_path.iterdir()] == ["model.weights.h5"]
    assert "no configuration here" in told[0]


def test_the_model_is_saved_now_and_then_while_training(tmp_path):
    """After a minute of training the model is there to find, before the run is over."""
    seconds, seen = [0.0], []

    def epoch_of_40_seconds(epoch, logs):
        seen.append((tmp_path / "model.keras").exists())
        seconds[0] += 40

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    console, files = PlainConsole(io.StringIO()), RunFiles(tmp_path, print)
    recorder = Recorder("a", files, console, keep=lambda: None, clock=lambda: seconds[0])
    slow = keras.callbacks.LambdaCallback(on_epoch_begin=epoch_of_40_seconds)
    x = np.ones((4, 1))
    fs.fit(model, x, x, epochs=4, verbose=0, callbacks=[slow, recorder])
    assert SECONDS_BETWEEN_SAVES == 60
    assert seen == [False, False, True, True]
    assert read(tmp_path / "summary.json")["status"] == "running"


def test_a_torn_write_leaves_the_old_file(tmp_path):
    """A write that fails half-way leaves the former file whole and no temporary one."""
    path = tmp_path / "summary.json"
    _json.write_json(path, {"epochs": 1})

    def torn(target: Path) -> None:
        target.write_text("{")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        _json.write_whole(path, torn)
    assert read(path) == {"epochs": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]


def test_json_of_everything():
    """Numbers of all kinds become JSON's; NaN and the infinities become their names."""

    @dataclass(frozen=True)
    class Config:
        path: Path = Path("a/b")
        sizes: tuple[int, ...] = (1, 2)

    value = {
        "nan": float("nan"),
        "infinities": [np.float32("inf"), -np.inf],
        "numpy": (np.int64(3), np.arange(2), np.bool_(True)),
        "jax": jnp.asarray(1.5, "bfloat16"),
        "config": Config(),
        "kind": int,
    }
    assert json.loads(_json.line(value)) == {
        "nan": "NaN",
        "infinities": ["Infinity", "-Infinity"],
        "numpy": [3, [0, 1], True],
        "jax": 1.5,
        "config": {"path": "a/b", "sizes": [1, 2]},
        "kind": "<class 'int'>",
    }
    # The names read back as the numbers.
    assert np.isnan(float("NaN"))
    assert float("-Infinity") == -np.inf


def test_curves_pair_training_with_validation():
    """Each metric gets a panel with its validation twin, the loss first; arrays get none."""
    history = {"mae": [1.0], "loss": [1.0], "val_loss": [1.0], "val_only": [1.0], "grid": [[1.0]]}
    assert _curves.panels(history) == ["loss", "mae", "only"]


def test_curves_of_numbers_that_are_not_finite(tmp_path):
    """A loss that is NaN, and a name that looks like mathematics, are drawn without complaint."""
    history = {"loss": [1.0, float("nan")], "a_$b": [float("inf")] * 2}
    _curves.draw(history, "run $1", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


# --- the console ------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_for_terminals_only():
    """Pipes, `TERM=dumb` and `NO_COLOR` get plain lines; a terminal gets bars."""
    assert isinstance(open_console(Terminal(), {}), LiveConsole)
    assert isinstance(open_console(io.StringIO(), {}), PlainConsole)
    assert isinstance(open_console(Terminal(), {"TERM": "dumb"}), PlainConsole)
    assert isinstance(open_console(Terminal(), {"NO_COLOR": "1"}), PlainConsole)


def test_bars_show_the_run_the_epoch_and_the_report(monkeypatch):
    """On a terminal the bars name the run, and what is said stays above them, as it was said."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with open_console(stream, {}) as console:
        console.begin("fold-1", 1, 2, 3)
        console.epoch(1, {"loss": 0.5})
        console.end("fold-1: [bold]done")
        console.table([{"method": "[red]a", "cost": 0.25}])
    said = stream.getvalue()
    for part in ("runs", "fold-1", "1/3", "loss 0.5000", "fold-1: [bold]done", "[red]a", "0.2500"):
        assert part in said


def test_plain_lines_come_once_a_second():
    """Of quick epochs one a second is printed; the first of each run always."""
    times = iter([0.0, 0.0, 0.1, 0.9, 1.0, 1.0, 1.1, 5.0, 5.0])
    stream = io.StringIO()
    console = PlainConsole(stream, clock=lambda: next(times))
    console.begin("a", 1, 2, 9)
    for epoch in range(1, 6):
        console.epoch(epoch, {"loss": 1 / epoch})
    console.begin("b", 2, 2, 9)
    console.epoch(1, {"loss": 1.0})
    said = stream.getvalue().splitlines()
    assert [line.split("  ")[:2] for line in said] == [
        ["a", "epoch 1/9"],
        ["a", "epoch 4/9"],
        ["b", "epoch 1/9"],
    ]


def test_plain_table():
    """A report is aligned, numbers to the right, with a gap where a row lacks a column."""
    stream = io.StringIO()
    PlainConsole(stream).table([{"run": "long", "cost": 0.5}, {"run": "b", "cost": 12, "n": None}])
    assert stream.getvalue().splitlines() == ["run     cost  n", "long  0.5000", "b         12"]


def test_a_reader_that_leaves_does_not_stop_the_training():
    """When whoever reads the output goes away the console falls silent and nothing is raised."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    console = PlainConsole(Gone())
    console.say("one")
    console.say("two")


def test_text_that_the_stream_cannot_encode():
    """A character that an ASCII stream lacks is replaced; printing never fails."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainConsole(stream).say("café")
    assert stream.buffer.getvalue() == b"caf?\n"


def test_figures():
    """Values have four digits, very small and large ones an exponent, other things their text."""
    logs = {"loss": 0.12345, "tiny": 1e-6, "zero": 0.0, "nan": float("nan"), "n": 3, "s": "x"}
    assert figures(logs) == "loss 0.1235  tiny 1.000e-06  zero 0.0000  nan nan  n 3  s x"
