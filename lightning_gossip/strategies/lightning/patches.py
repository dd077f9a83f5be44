"""Replacements on Lightning's own objects, all of them on instances, and all undone.

Lightning offers no hook for what a strategy without per-step synchronisation needs (docs/assumptions.md lists each one and
why), so a few private methods are replaced on the objects of one Trainer. A name that is gone is an error, not a silent no-op.
"""

from __future__ import annotations

from typing import Any

from lightning_gossip.errors import ProtocolError

_ABSENT = object()


class Patches:
    """Attributes set on objects, to be put back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute that exists.

        Raises:
            ProtocolError: if it does not exist, so that an unknown Lightning release is noticed at once.
        """
        if not hasattr(target, name):
            raise ProtocolError(
                f"{type(target).__module__}.{type(target).__name__} has no {name!r}: this release of Lightning is not"
                " supported. Install one that satisfies lightning>=2.6,<2.7."
            )
        self._undo.append((target, name, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def restore(self) -> None:
        """Undo everything, last first. May be called twice."""
        while self._undo:
            target, name, value = self._undo.pop()
            if value is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, value)
