"""The fields of a `Config` as command-line flags.

argparse prints the help; the tokens are read here, because argparse takes `-1e-3` for a flag and
its messages cannot say what was expected and what was received.
"""

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NONE = "none"  # what a user writes for None where a field is optional
REQUIRED = object()  # stands for the default that a field does not have


class UsageError(Exception):
    """The command line is wrong; the message says how, in one line."""


@dataclass(frozen=True)
class Flag:
    """One flag: `--batch-size` for the field `batch_size`.

    Args:
        field: the field's name.
        kind: `int`, `float`, `bool` or `str`; `None` where the command line cannot set it.
        choices: the allowed values of a `Literal`, else empty.
        optional: whether `none` is a value.
        default: the field's default, or `REQUIRED`.
        help: what the field's metadata say under "help".
        annotation: the field's type as its author wrote it.
    """

    field: str
    kind: type | None = None
    choices: tuple[Any, ...] = ()
    optional: bool = False
    default: Any = REQUIRED
    help: str = ""
    annotation: str = ""

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def negation(self) -> str:
        return "--no-" + self.field.replace("_", "-")

    @property
    def expected(self) -> str:
        if self.choices:
            text = "one of " + ", ".join(str(choice) for choice in self.choices)
        else:
            text = {int: "an integer", float: "a number", str: "text"}.get(self.kind, "")
        return f"{text} or {NONE}" if self.optional else text


def flags_of(config_class: type) -> tuple[Flag, ...]:
    """The flags of a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(config_class)
    return tuple(
        _flag(field, hints[field.name]) for field in dataclasses.fields(config_class) if field.init
    )


def _flag(field: dataclasses.Field, hint: Any) -> Flag:
    inner, optional = _without_none(hint)
    kind, choices = inner, ()
    if typing.get_origin(inner) is typing.Literal:
        kind = str
        choices = tuple(choice for choice in typing.get_args(inner) if choice is not None)
        optional = optional or len(choices) < len(typing.get_args(inner))
    if kind not in (int, float, bool, str):
        kind = None
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        default = REQUIRED if field.default is dataclasses.MISSING else field.default
    text = str(field.metadata.get("help", ""))
    annotation = inner.__name__ if isinstance(inner, type) and inner is hint else str(hint)
    annotation = annotation.replace("typing.", "")
    return Flag(field.name, kind, choices, optional, default, text, annotation)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`T, True` for `Optional[T]` and `T | None`, else the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return hint, False


def parse(tokens: Sequence[str], flags: Iterable[Flag]) -> dict[str, Any]:
    """Read `--name value`, `--name=value`, `--flag` and `--no-flag`; the last one wins.

    Returns:
        field -> value, for the flags that were given.

    Raises:
        UsageError: for an unknown flag, a missing or wrong value, or a required flag not given.
    """
    flags = tuple(flags)
    by_name = {flag.name: flag for flag in flags}
    negations = {flag.negation: flag for flag in flags if flag.kind is bool}
    values: dict[str, Any] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        name, equals, text = _name(token), "=" in token, token.partition("=")[2]
        flag = by_name.get(name) or negations.get(name)
        if flag is None:
            raise _unknown(name, [*by_name, *negations])
        if flag.kind is bool:
            if equals:
                raise UsageError(
                    f"{flag.name} takes no value: write {flag.name} or {flag.negation}. "
                    f"Received: {name}={text}"
                )
            values[flag.field] = name == flag.name
            continue
        if not equals:
            if not rest or _name(rest[0]) in by_name.keys() | negations.keys():
                raise UsageError(f"{name} expects {flag.expected}. Received: nothing")
            text = rest.pop(0)
        values[flag.field] = _convert(flag, text)
    for flag in flags:
        if flag.default is REQUIRED and flag.field not in values:
            raise UsageError(f"{flag.name} is missing: the field has no default. {_give(flag)}")
    return values


def _name(token: str) -> str:
    """`--batch_size` is how the field is spelled, `--batch-size` how flags are: both will do."""
    return token.partition("=")[0].replace("_", "-")


def _give(flag: Flag) -> str:
    if flag.kind is bool:
        return f"Give {flag.name} or {flag.negation}"
    return f"Give {flag.name} and {flag.expected}"


def _unknown(name: str, known: list[str]) -> UsageError:
    if not name.startswith("-"):
        return UsageError(f"unexpected argument {name!r}: a value follows its flag")
    begun = [each for each in known if each.startswith(name)]
    close = begun or difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(known)}"
    return UsageError(f"unknown flag {name}. {hint}")


def _convert(flag: Flag, text: str) -> Any:
    if flag.kind is None:
        raise UsageError(
            f"{flag.name} cannot be set from the command line: its type {flag.annotation} is "
            "none of int, float, bool, str, Literal. Set it in the experiment's file"
        )
    if flag.optional and text.lower() == NONE:
        return None
    try:
        if flag.choices:
            return {str(choice): choice for choice in flag.choices}[text]
        return flag.kind(text)
    except (KeyError, ValueError):
        message = f"{flag.name} expects {flag.expected}. Received: {text!r}"
        raise UsageError(message) from None


def add_to_help(parser: argparse._ActionsContainer, flags: Iterable[Flag]) -> None:
    """Describe the flags in a parser that is used for its help alone."""
    for flag in flags:
        about = ["" if flag.kind else "set in the file only", flag.annotation]
        about.append("required" if flag.default is REQUIRED else f"default: {flag.default!r}")
        text = f"{flag.help} ({', '.join(part for part in about if part)})".strip()
        text = text.replace("%", "%%")
        if flag.kind is bool:
            parser.add_argument(flag.name, flag.negation, action="store_true", help=text)
        else:
            metavar = "|".join(map(str, flag.choices)) or (flag.kind or object).__name__.upper()
            parser.add_argument(flag.name, metavar=metavar, help=text)
