"""Pain 50: private names of Keras stand in `fitstep/_keras` only, so that an upgrade moves one folder.

The example: `jax_state_sync` and `_symbolic_build` have other names in the nightly.
"""

import ast
import importlib
from pathlib import Path

import keras
import numpy as np
import pytest

import fitstep as fs

PACKAGE = Path(fs.__file__).parent
OUTSIDE = sorted(
    path for path in PACKAGE.rglob("*.py") if "_keras" not in path.relative_to(PACKAGE).parts
)
INSIDE = sorted((PACKAGE / "_keras").glob("*.py"))


def tree_of(path):
    return ast.parse(path.read_text())


def private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names():
    """Private attributes that fitstep's own classes define, outside `_keras`, by `self` or in a body."""
    found = set()
    for path in OUTSIDE:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                for item in ast.walk(node):
                    if isinstance(item, ast.FunctionDef):
                        found.add(item.name)
                    elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
                        if isinstance(item.value, ast.Name) and item.value.id in ("self", "cls"):
                            found.add(item.attr)
                    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        found.add(item.target.id)
            elif isinstance(node, ast.Assign):
                found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
    return {name for name in found if private(name)}


def modules():
    return {
        part
        for path in PACKAGE.rglob("*")
        if path.suffix == ".py" or path.is_dir()
        for part in path.relative_to(PACKAGE).with_suffix("").parts
    }


def used_outside():
    """(file:line, private attribute) for every private attribute read or written outside `_keras`."""
    for path in OUTSIDE:
        for node in ast.walk(tree_of(path)):
            where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and private(node.attr):
                yield where, node.attr
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "setattr",
                "hasattr",
                "delattr",
            ):
                name = node.args[1]
                if isinstance(name, ast.Constant) and private(name.value):
                    yield where, name.value


def keras_private_names():
    """The private attributes of Keras's own objects, instances of everything that a fit touches."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    history = keras.callbacks.History()
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[history])
    things = [
        model,
        model.layers[0],
        model.optimizer,
        model.metrics[0],
        model.trainable_variables[0],
        history,
        keras.callbacks.CallbackList([]),
        keras.losses.MeanSquaredError(),
        keras.Input((1,)),
        keras.Model,
    ]
    return {name for thing in things for name in dir(thing) if private(name)}


def test_no_file_outside_the_folder_imports_or_names_keras_src():
    """`keras.src` appears in no import, attribute or string of the code outside `_keras`."""
    found = []
    for path in OUTSIDE:
        tree = tree_of(path)
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [] if id(node) in docstrings else [node.value]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            found += [
                f"{path.relative_to(PACKAGE)}:{node.lineno} {name}"
                for name in names
                if "keras.src" in name
            ]
    assert found == []


def test_private_attributes_outside_the_folder_are_fitstep_s_own():
    """Every `._something` outside `_keras` is a name that fitstep itself defines there."""
    # Of a NamedTuple, and the type of argparse's groups: Python's, not Keras's.
    own = own_names() | modules() | {"_asdict", "_replace", "_fields", "_ActionsContainer"}
    found = [use for use in used_outside() if use[1] not in own]
    assert not found, found


def test_none_of_them_is_a_private_name_of_keras():
    """Nothing that fitstep defines outside `_keras` on an object of Keras shadows a name of Keras."""
    theirs = keras_private_names()
    assert {"_symbolic_build", "_value", "_layers", "_compile_loss"} & theirs  # the list sees them
    found = [use for use in used_outside() if use[1] in theirs]
    assert not found, found


def test_methods_that_our_classes_override_are_public_names_of_keras():
    """A class outside `_keras` that extends a class of Keras overrides no private method of it."""
    theirs = keras_private_names()
    found = []
    for path in OUTSIDE:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                found += [
                    f"{path.name}:{item.lineno} {node.name}.{item.name}"
                    for item in node.body
                    if isinstance(item, ast.FunctionDef) and item.name in theirs
                ]
    assert found == []


def test_the_scan_finds_what_it_is_to_find():
    """The folder itself, held to the same rule, breaks it: the scan is not blind."""
    theirs = keras_private_names()
    uses = [
        node.attr
        for path in INSIDE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and private(node.attr)
    ]
    assert set(uses) & theirs


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: path.stem)
def test_every_name_taken_from_keras_src_is_there_in_this_keras(path):
    """Whatever a file of `_keras` imports from `keras.src` at any place exists in this version, or is tried."""
    tree = tree_of(path)
    tried = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src"):
            if id(node) in tried:
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


def test_every_module_of_the_package_imports_on_this_keras():
    """Importing each module finds every private name that is taken at import time."""
    names = [
        ".".join(("fitstep", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in (*OUTSIDE, *INSIDE)
        if path.stem not in ("__main__", "__init__")
    ]
    assert "fitstep._keras._trainer" in names
    for name in names:
        importlib.import_module(name)
