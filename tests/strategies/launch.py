"""Runs one function in several fresh processes that Lightning takes for the workers of one job (tests/strategies/jobs.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recipes.processes import reserved_port
from tests.strategies.jobs import End, job

__all__ = ["launch", "outcomes", "reserved_port"]


def launch(scenario: Callable[..., Any], *args: Any, workers: int = 2, timeout_s: float = 90.0, **kwargs: Any) -> list[Any]:
    """What ``scenario(*args, **kwargs)`` returned on each rank; an AssertionError with all tracebacks if one failed."""
    results = outcomes(scenario, *args, workers=workers, timeout_s=timeout_s, **kwargs)
    failures = [f"--- rank {rank}\n{result}" for rank, (ok, result) in enumerate(results) if not ok]
    assert not failures, "\n".join(failures)
    return [result for _, result in results]


def outcomes(
    scenario: Callable[..., Any], *args: Any, workers: int = 2, timeout_s: float = 90.0, **kwargs: Any
) -> list[tuple[bool, Any]]:
    """Per rank: (True, returned value) or (False, traceback)."""
    with job(scenario, *args, workers=workers, **kwargs) as running:
        running.start_all()
        return [_of(end) for end in running.ends(timeout_s)]


def _of(end: End) -> tuple[bool, Any]:
    if end.how != "told" or end.status == 0:
        return end.ok, end.value
    return False, f"the process {'did not end' if end.status is None else f'ended with {end.status}'} after {end.value}"
