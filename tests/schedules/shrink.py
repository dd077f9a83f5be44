"""Fewer and smaller choices that still break an invariant."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shrunk(choices: Sequence[int], fails: Callable[[Sequence[int]], bool], *, tries: int = 2000) -> list[int]:
    """Cut the end off, leave blocks out, make numbers smaller, as long as the schedule still fails.

    Args:
        choices: a schedule that fails.
        fails: whether another one does.
        tries: schedules to run at most.
    """
    best, left = list(choices), tries

    def take(candidate: list[int]) -> bool:
        nonlocal best, left
        if left == 0 or candidate == best:
            return False
        left -= 1
        if fails(candidate):
            best = candidate
            return True
        return False

    cut = len(best) // 2
    while cut:
        if not take(best[:-cut]):
            cut //= 2
    size = max(1, len(best) // 2)
    while size and left:
        start = 0
        while start < len(best):
            if not take(best[:start] + best[start + size :]):
                start += size
        size //= 2
    for place in range(len(best)):
        for smaller in (0, best[place] // 2, best[place] - 1) if place < len(best) else ():
            if place < len(best) and 0 <= smaller < best[place]:
                take([*best[:place], smaller, *best[place + 1 :]])
    while best and best[-1] == 0:
        best.pop()
    return best
