"""The experiments that come with fitstep: one file each, run by `fitstep train NAME`.

They are found by reading this folder, not by importing it: their packages (the extra `demo`) are
asked for only by the one that is run. A file whose name starts with `_` is none.
"""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
# The packages of the extra `demo`, as they are imported.
REQUIRED = ("sklearn", "pandas", "matplotlib")


def names() -> tuple[str, ...]:
    """The names of the built-in experiments, in alphabetical order."""
    stems = (path.stem for path in FOLDER.glob("*.py"))
    return tuple(sorted(stem for stem in stems if not stem.startswith("_")))


def summary(name: str) -> str:
    """The first line of an experiment's docstring, read without importing it."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
