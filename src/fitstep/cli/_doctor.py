"""`fitstep doctor [--clear-cache] [--json]`: what training would run on here, and what is wrong."""

import argparse
import json
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fitstep import _cache_folder
from fitstep._backend import VARIABLE
from fitstep.cli import _flags
from fitstep.cli._accelerators import Problem
from fitstep.cli._examination import OPTIONAL, TITLES, Part, cache_root, examine, set_line
from fitstep.cli._flags import Flag, UsageError
from fitstep.records._console import PlainConsole

FLAGS = (
    Flag(
        "clear_cache", bool, default=False, help="delete what fitstep keeps compiled, and no more"
    ),
    Flag("json", bool, default=False, help="print one JSON object"),
)

_WIDTH, _LABEL = 100, 15


def command(tokens: Sequence[str]) -> int:
    """Print the report; returns 0 if nothing is wrong, else 1."""
    if any(token in ("-h", "--help") for token in tokens):
        parser = argparse.ArgumentParser(
            prog="fitstep doctor",
            usage="fitstep doctor [--clear-cache] [--json]",
            description="Versions, backend, devices, settings and cache; what is wrong comes last.",
        )
        for flag in FLAGS:
            parser.add_argument(flag.name, action="store_true", help=flag.help)
        parser.print_help()
        return 0
    try:
        options = _flags.parse(tokens, FLAGS)
    except UsageError as error:
        raise UsageError(f"doctor: {error}") from None
    say = PlainConsole(sys.stdout).say
    as_json = options.get("json", False)
    if options.get("clear_cache"):
        cleared = _clear()
        say(json.dumps(cleared.found, indent=2) if as_json else _told_of_clearing(cleared))
        return 1 if cleared.problems else 0
    report = examine()
    for line in [json.dumps(report, indent=2)] if as_json else _lines(report):
        say(line)
    return 1 if report["problems"] else 0


def _clear() -> Part:
    try:
        freed = _cache_folder.clear()
    except _cache_folder.UnusableError as error:
        problem = Problem(str(error), error.remedy)
    except OSError as error:
        problem = Problem(f"{error.filename}: {error.strerror}", "delete it by hand")
    else:
        return Part({"folder": str(cache_root()), "freed": freed._asdict(), "problems": []})
    found = {"folder": str(cache_root()), "freed": None, "problems": [problem._asdict()]}
    return Part(found, [problem])


# --- in words -----------------------------------------------------------------------------------


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for label, text in _rows(report):
        yield from _wrapped(text, label.ljust(_LABEL), " " * _LABEL)
    problems = report["problems"]
    yield ""
    if not problems:
        yield "Nothing is wrong."
        return
    yield "1 problem:" if len(problems) == 1 else f"{len(problems)} problems:"
    for problem in problems:
        yield from _told(**problem)


def _told(what: str, remedy: str) -> list[str]:
    line = f"  {what} - {remedy}"
    if len(line) <= _WIDTH:
        return [line]
    # The remedy stays in one piece, to be copied.
    return [*_wrapped(f"{what} -", "  ", "    "), f"    {remedy}"]


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    versions: dict[str, str | None] = report["versions"]
    for name, version in versions.items():
        if version is not None or name not in OPTIONAL:
            yield TITLES.get(name, name), version or "not installed"
    yield "Keras backend", _backend(report["keras"])
    for name in ("floatx", "dtype_policy", "distribution"):
        if report["keras"].get(name):
            yield name.replace("_", " "), report["keras"][name]
    yield "JAX backend", report["jax"]["backend"] or "none"
    devices = [
        (each["platform"], each["kind"], each["memory"]) for each in report["jax"]["devices"]
    ]
    for (on, kind, memory), count in Counter(devices).items():
        of_them = kind if kind == on else f"{kind} ({on})"
        yield "devices", f"{count} x {of_them}" + (f", {_size(memory)}" if memory else "")
    for name in report["accelerators"]:
        yield "found", name
    for name, setting in report["settings"].items():
        about = f" ({setting['about']})" if setting["about"] else ""
        yield "setting", f"{name}={setting['value']}{about}"
    yield "cache", _cache_in_words(report["cache"])


def _backend(keras: dict[str, Any]) -> str:
    asked, origin, live = keras["asked"], keras["origin"], keras["live"]
    if asked is None:
        return f"{live or 'none'}; nothing asks for another"
    if origin == VARIABLE or asked == "jax":
        return f"{asked}, from {origin}"
    return (
        f"jax where fitstep is imported before Keras; otherwise {asked}, from {origin}. For JAX in "
        f"either order: {set_line(VARIABLE, 'jax')}"
    )


def _cache_in_words(cache: dict[str, Any]) -> str:
    state = "on" if cache["on"] else "off"
    why = f" ({cache['why']})" if cache["why"] else ""
    where = f" in {cache['folder']}" if cache["folder"] else ""
    if cache["on"] and cache["why"]:  # not ours: what is in it was not counted
        return f"{state}{why}{where}"
    return f"{state}{why}; {_entries(cache)}, {_size(cache['bytes'])},{where}".removesuffix(",")


def _told_of_clearing(cleared: Part) -> str:
    if cleared.problems:
        return "\n".join(["Not cleared:", *_told(*cleared.problems[0])])
    freed = cleared.found["freed"]
    return f"Freed {_size(freed['bytes'])} in {cleared.found['folder']} ({_entries(freed)})"


def _entries(held: dict[str, Any]) -> str:
    count = held["entries"]
    return f"{count} {'entry' if count == 1 else 'entries'}"


def _size(count: int) -> str:
    """`1.4 MiB`, in the largest unit of which there is one.

    >>> _size(0), _size(1023), _size(1536), _size(139 * 2**30)
    ('0 B', '1023 B', '1.5 KiB', '139.0 GiB')
    """
    power = min(int(math.log2(count)) // 10, 4) if count > 0 else 0
    digits = 1 if power else 0
    return f"{count / 2 ** (10 * power):.{digits}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
