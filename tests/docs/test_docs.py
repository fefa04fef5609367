"""The documentation is executed: its code runs, and what it says is printed is printed."""

import contextlib
import importlib
import io
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

import fitstep

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r" +# .*")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, monkeypatch):
    """Python blocks run one after another; a bare block after one that prints is its output."""
    # A module of its own, since dataclasses look theirs up; it goes with its models.
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = ""
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            assert not printed, f"{page.name} prints this, but does not show it: {printed}"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(page), "exec"), vars(module))
            printed = out.getvalue()
        elif not language and printed:
            assert printed == text
            printed = ""
    assert not printed, f"{page.name} prints this, but does not show it: {printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Every file that a page links to is there."""
    missing = [
        target
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not missing


def test_the_spanish_readme_says_the_same():
    """It has the headings and the code blocks of the English one; only comments are translated."""

    def outline(name):
        text = (ROOT / name).read_text(encoding="utf-8")
        blocks = [(language, COMMENT.sub("", code)) for language, code in BLOCK.findall(text)]
        return re.findall(r"^#+ ", BLOCK.sub("", text), re.MULTILINE), blocks

    assert outline("README.es.md") == outline("README.md")


def test_every_public_name_has_a_docstring():
    """What `fitstep` exports is documented."""
    assert not [name for name in fitstep.__all__ if not getattr(fitstep, name).__doc__]


def _modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages(fitstep.__path__, "fitstep.")]


@pytest.mark.parametrize("name", _modules())
def test_the_examples_in_docstrings_run(name):
    """Every `>>>` example gives what it says."""
    import doctest

    if name == "fitstep.__main__":
        return
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
