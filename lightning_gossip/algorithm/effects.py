"""How a protocol without I/O is driven.

A protocol of this package is a generator: it yields *effects*, small frozen values that say what is to be done next (begin an
averaging, send an update), and is resumed with what came of each. It holds the decisions; whoever drives it moves the bytes and
waits: the runtime with collectives and sockets, the simulator under virtual time, a test by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

Effect = TypeVar("Effect")
Result = TypeVar("Result")
Event = TypeVar("Event")

_NO_LOCK = nullcontext()


def perform(
    effects: Generator[Effect, Any, Result],
    do: Callable[[Effect], Any],
    *,
    lock: AbstractContextManager[Any] = _NO_LOCK,
    outcomes: tuple[type[Exception], ...] = (),
) -> Result:
    """Drive a protocol by a function that does each effect.

    Args:
        effects: of the protocol, not begun yet.
        do: does an effect and returns what came of it. What it raises ends the drive, and closes the protocol.
        lock: guards what this protocol shares with others; held while it runs, never during an effect.
        outcomes: exceptions of ``do`` that are raised where the protocol has yielded the effect, and may be caught there.

    Returns:
        What the protocol returns.

    >>> def twice():
    ...     return (yield "ask") + (yield "ask again")
    >>> perform(twice(), len)
    12
    """
    outcome: Any = None
    raised: Exception | None = None
    try:
        while True:
            with lock:
                try:
                    effect = effects.send(outcome) if raised is None else effects.throw(raised)
                except StopIteration as end:
                    result: Result = end.value
                    return result
            try:
                outcome, raised = do(effect), None
            except outcomes as error:
                outcome, raised = None, error
    finally:
        with lock:
            effects.close()


def perform_in_time(
    effects: Generator[Effect, Any, Result], do: Callable[[Effect], Generator[Event, Any, Any]]
) -> Generator[Event, Any, Result]:
    """Run a protocol to its end where doing an effect takes simulated time: :func:`perform` as a process of SimPy.

    Args:
        effects: of the protocol, not begun yet.
        do: does an effect as a generator of events to be waited for, and returns what came of it.

    Returns:
        What the protocol returns, when all events have happened.
    """
    outcome = None
    while True:
        try:
            effect = effects.send(outcome)
        except StopIteration as end:
            result: Result = end.value
            return result
        outcome = yield from do(effect)
