"""networkx, imported when the first graph is made: its 280 modules are a third of what importing this package would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            import networkx

            return getattr(networkx, name)

    nx = _Later()

__all__ = ["nx"]
