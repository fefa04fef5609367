"""`fitstep bench`: what it times, what it prints, and how it refuses. No test looks at a clock."""

import json
import re
import sys

import pytest

from fitstep.cli import _bench, main

OWN = '''"""Models to be timed."""
import keras
import numpy as np

import fitstep as fs

X = np.linspace(-1, 1, 140, dtype="float32").reshape(70, 2)
Y = X.sum(axis=1, keepdims=True)


def compiled(kind=keras.Sequential):
    model = kind([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


ONE = compiled()
HEARD = []


def three():
    print("hello from the factory")
    return compiled(), X, Y


def run():
    heard = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: HEARD.append(epoch))
    return fs.Run(compiled(fs.Sequential), X, Y, batch_size=32, callbacks=[heard], epochs=7)


def shared():
    return ONE, X, Y


def nothing():
    compiled()


def once():
    return compiled(), iter([(X, Y)]), None


def with_argument(config):
    return compiled(), X, Y


def failing():
    raise RuntimeError("planned")
'''


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """A folder with a file of factories; one epoch is enough for a timed fit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(_bench, "SHORTEST", 0.0)
    (tmp_path / "own_models.py").write_text(OWN)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("own_models", "_fitstep_experiment_own_models"):
            del sys.modules[name]


@pytest.mark.parametrize("factory", ["own_models.py:three", "own_models:three"])
def test_a_table_with_one_row_for_an_own_model(capsys, factory):
    """A file's or a module's factory is timed; the row has both costs and the ratio's spread."""
    assert main(["bench", factory, "--pairs", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    cells = r"\d+ +\d+  \d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\] +3"
    assert re.search(rf"^{re.escape(factory)} +{cells}$", out, re.MULTILINE)


def test_json_is_all_that_standard_output_gets(capsys):
    """With --json, what a factory prints and the progress go to standard error."""
    assert main(["bench", "own_models.py:run", "--json", "--pairs", "3"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert row["steps"] == 3  # 70 rows in batches of 32, however many epochs the run asks for
    assert [len(row["seconds"][side]) for side in ("stock", "fs")] == [3, 3]
    assert row["fs_over_stock"]["low"] <= row["fs_over_stock"]["high"]
    assert "stock fit" in err


def test_both_loops_train_a_model_that_has_the_engine(monkeypatch):
    """An fs.Model is trained by Keras's own loop on the stock side; the run's callbacks hear it."""
    from fitstep.engine import _loop

    trained = []
    train = _loop.train
    monkeypatch.setattr(
        _loop, "train", lambda run, **more: (trained.append(run.model), train(run, **more))[1]
    )
    (row,) = _bench._measured("own_models.py:run", pairs=2)
    assert len(trained) == 3  # one that compiles and two that count, all of one model
    assert len({id(model) for model in trained}) == 1
    heard = sys.modules["_fitstep_experiment_own_models"].HEARD
    # Two more on the stock side, which learn how many steps there are and how long they take,
    # where the second is made twice: once to compile.
    assert heard == [0] * (3 + 3 + 3)
    assert row.steps == 3


def test_the_built_in_models(monkeypatch, capsys):
    """Without an argument, four kinds of models are timed, one after the other."""
    built_in = _bench._built_in
    monkeypatch.setattr(_bench, "_built_in", lambda: built_in()[:1])
    assert [subject.name.split()[0] for subject in built_in()] == [
        "MLP",
        "CNN",
        "LSTM",
        "Transformer",
    ]
    assert main(["bench", "--pairs", "1"]) == 0
    assert "MLP 2x64, batch 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["own_models"], "give MODULE:FACTORY or FILE.py:FACTORY"),
        (["own_models.py:absent"], "own_models.py has no function `absent`"),
        (["nowhere.py:three"], "the file nowhere.py does not exist"),
        (["nowhere:three"], "there is no module 'nowhere', here or installed"),
        (["own_models.py:with_argument"], "must take no arguments. Received: `(config)`"),
        (["own_models.py:nothing"], "Received: NoneType. Is a `return` missing?"),
        (["own_models.py:once"], "can be passed over only once"),
        (["own_models.py:shared"], "returned the same model twice"),
        (["--pairs", "0"], "--pairs must be at least 1. Received: 0"),
        (["--paris", "3"], "Did you mean --pairs?"),
    ],
)
def test_refusals(capsys, arguments, said):
    """What cannot be timed is refused in one line that says what to do."""
    assert main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_an_error_of_the_factory_is_shown_as_its_own(capsys):
    """The traceback begins in the user's file, and the exit code is 1."""
    assert main(["bench", "own_models.py:failing"]) == 1
    err = capsys.readouterr().err
    assert "own_models.py" in err.splitlines()[1]
    assert err.splitlines()[-1] == "RuntimeError: planned"


def test_help(capsys):
    """`fitstep bench --help` says what a factory returns."""
    assert main(["bench", "--help"]) == 0
    assert "(model, x, y)" in capsys.readouterr().out
