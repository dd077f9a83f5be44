"""Arguments that a class does not take: errors that say what to write instead, in place of Python's TypeError."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_gossip.errors import ConfigurationError

C = TypeVar("C", bound=type)


def clear_arguments(cls: C) -> C:
    """Make wrong arguments of a class's constructor a ConfigurationError with the call that was probably meant.

    Its signature stays as it is, for tools that read it (LightningCLI, Hydra, editors). Outside of ``@dataclass``.

    >>> @clear_arguments
    ... class Probe:
    ...     def __init__(self, every_n: int = 1, *, leading: int = 4) -> None: ...
    >>> Probe(every=2)
    Traceback (most recent call last):
    lightning_gossip.errors.ConfigurationError: Probe has no argument 'every'. Did you mean 'every_n'? Write Probe(every_n=2).
    >>> Probe(1, 8)
    Traceback (most recent call last):
    lightning_gossip.errors.ConfigurationError: Probe takes 'leading' by name. Write Probe(1, leading=8).
    """
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def explaining(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError:
            own = type(self) if type(self).__init__ is explaining else cls  # a subclass may have no constructor of its own
            wrong = _what_is_wrong(own, args, kwargs)
            if wrong is None:
                raise
            raise ConfigurationError(wrong) from None

    cls.__init__ = explaining  # type: ignore[misc]
    return cls


def _what_is_wrong(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a class cannot be made of these arguments, and what to write; None if it can."""
    name, known, signature = cls.__name__, _known(cls), inspect.signature(cls)
    unknown = [key for key in kwargs if key not in known]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if unknown and not _hands_on(signature):
            return no_argument(name, unknown[0], kwargs[unknown[0]], known)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        by_place = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        if len(args) > len(by_place):
            return _too_many(cls, args, kwargs, by_place, parameters)
        twice = [p.name for p, _ in zip(by_place, args, strict=False) if p.name in kwargs]
        if twice:
            return f"{name} got {twice[0]!r} twice, by place and by name. Write it once."
        missing = [p.name for p in parameters[len(args) :] if p.default is p.empty and p.name not in kwargs]
        if missing:
            call = ", ".join([*map(_short, args), *(f"{key}=..." for key in missing), *_named(kwargs)])
            return f"{name} needs {' and '.join(map(repr, missing))}. Write {name}({call})."
        return f"{name}: {error}."
    return no_argument(name, unknown[0], kwargs[unknown[0]], known) if unknown else None


def _known(cls: type) -> list[str]:
    """The names of a class's arguments, with those that it hands on to its bases."""
    known: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            signature = inspect.signature(base)
            known |= {p.name: None for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
            if not _hands_on(signature):
                break
    return list(known)


def _hands_on(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def no_argument(name: str, word: str, value: object, known: Iterable[str]) -> str:
    """The sentence that a class has no argument of this name, and which one is near.

    Args:
        name: of the class.
        word, value: as they were given.
        known: its arguments.
    """
    known = list(known)
    if not known:
        return f"{name} has no argument {word!r}. It takes none: write {name}()."
    near = nearest(word, known)
    if near is None:
        return f"{name} has no argument {word!r} (value {_short(value)}). It has: {', '.join(sorted(known))}."
    return f"{name} has no argument {word!r}. Did you mean {near!r}? Write {name}({near}={_short(value)})."


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The name that is nearest to a word that is none; None if all are far.

    >>> nearest("topolgy", ["roles", "topology"]), nearest("every", ["seed", "every_n_epochs"]), nearest("x", ["seed"])
    ('topology', 'every_n_epochs', None)
    """
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    parts = [name for name in known if str(word) in name.split("_")]
    return next(iter(close or parts), None)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A question, with a space before it, for an unknown name; empty if no known one is near.

    >>> did_you_mean("rign", ["ring", "star"])
    " Did you mean 'ring'?"
    """
    near = nearest(word, known)
    return "" if near is None else f" Did you mean {near!r}?"


def _too_many(
    cls: type,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    by_place: Sequence[inspect.Parameter],
    parameters: Sequence[inspect.Parameter],
) -> str:
    name = cls.__name__
    if not parameters:
        return f"{name} takes no arguments. Write {name}()."
    free = [p for p in parameters[len(by_place) :] if p.name not in kwargs]
    surplus = args[len(by_place) :]
    if len(surplus) > len(free):
        names = ", ".join(p.name for p in parameters)
        return f"{name} takes at most {len(parameters)} arguments and got {len(args) + len(kwargs)}. It has: {names}."
    chosen: dict[str, Any] = {}
    hints = _hints(cls)
    for value in surplus:  # the first one that takes it
        left = [p for p in free if p.name not in chosen]
        chosen[next((p.name for p in left if _takes(p, hints.get(p.name), value)), left[0].name)] = value
    call = ", ".join([*map(_short, args[: len(by_place)]), *_named(chosen), *_named(kwargs)])
    if not by_place:
        return f"{name} takes its arguments by name. Write for example {name}({call})."
    return f"{name} takes {' and '.join(map(repr, chosen))} by name. Write {name}({call})."


def _hints(cls: type) -> dict[str, Any]:
    """The types of a constructor's arguments, as far as they can be resolved: those of a dataclass where it is defined."""
    for of in (cls.__init__, cls):  # type: ignore[misc]
        with suppress(NameError):
            return get_type_hints(of)
    return {}


def _takes(parameter: inspect.Parameter, hint: Any, value: object) -> bool:
    """Whether an argument may have a value, by its type; by its default where that is not known."""
    if hint is None:
        return type(parameter.default) is type(value)
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if get_origin(kind) is Literal:
            takes = value in get_args(kind)
        else:
            takes = isinstance(kind, type) and isinstance(value, kind) and isinstance(value, bool) <= (kind is bool)
        if takes:
            return True
    return False


def _named(kwargs: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_short(value)}" for key, value in kwargs.items()]


def _short(value: object) -> str:
    """A value as in a call; ``...`` for one that is long to write."""
    written = repr(value)
    return written if len(written) <= 40 and not written.startswith("<") else "..."
