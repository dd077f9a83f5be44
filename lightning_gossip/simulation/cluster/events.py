"""A word for SimPy's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpy.events import Event


def then(event: Event, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function when an event is processed."""

    def call(_: Event) -> None:
        function(*arguments)

    event.callbacks.append(call)
