"""The shape of the tree: imports go one way, and private Keras names stay in `_keras`."""

import ast
from pathlib import Path

import pytest

import fitstep

SOURCE = Path(fitstep.__file__).parent
# From the bottom to the top; a module imports only what stands before it.
ORDER = [
    "_errors",
    "_backend",
    "_cache_folder",
    "_cache",
    "_warn",
    "data",
    "_keras",
    "_state",
    "_returned",
    "_leaks",
    "_step",
    "engine",
    "_capture",
    "_explain",
    "_fit",
    "_model",
    "_run",
    "records",
    "experiments",
    "cli",
]
MODULES = sorted(SOURCE.rglob("*.py"))


def _place(parts: tuple[str, ...]) -> int | None:
    return ORDER.index(parts[0]) if parts and parts[0] in ORDER else None


def _imports(path: Path) -> list[str]:
    """The dotted names that a module imports, also inside functions, but not for types only."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    """A module imports only modules below it in the order that the design writes down."""
    own = path.relative_to(SOURCE).with_suffix("").parts
    if own[0] in ("__init__", "__main__"):
        return
    place = _place(own)
    assert place is not None, f"{own[0]} has no place in the order"
    for name in _imports(path):
        if (
            name.startswith("fitstep.")
            and (other := _place(tuple(name.split(".")[1:]))) is not None
        ):
            assert other <= place, f"{'/'.join(own)} imports {name}, which stands above it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_keras_modules_are_imported_in_one_folder(path):
    """Only `_keras` imports from `keras.src`, so that a new Keras is a matter of one folder."""
    if "_keras" not in path.parts:
        assert not [name for name in _imports(path) if name.startswith("keras.src")]


def test_the_order_names_what_is_there():
    """Every top-level module and folder has its place, and every place its module."""
    there = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert there - {"__init__", "__main__"} == set(ORDER)
