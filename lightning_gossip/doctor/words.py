"""Numbers as a reader in a hurry wants them."""

from __future__ import annotations

from collections.abc import Iterable


def duration(seconds: float) -> str:
    """Three digits and a unit.

    >>> duration(0.00012), duration(0.25), duration(3.14159)
    ('120 µs', '250 ms', '3.14 s')
    """
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def at_rate(bytes_a_second: float) -> str:
    """A rate as text, in bytes a second, as exchanges are counted.

    >>> at_rate(1.25e8), at_rate(2.4e9), at_rate(5e4)
    ('125 MB/s', '2.4 GB/s', '50 kB/s')
    """
    for limit, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_a_second >= limit:
            return f"{bytes_a_second / limit:.3g} {unit}"
    return f"{bytes_a_second:.3g} B/s"


def size(nbytes: int) -> str:
    """A power of two.

    >>> size(4096), size(1 << 26)
    ('4 kiB', '64 MiB')
    """
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} kiB"


def many_times(factor: float) -> str:
    """How many times.

    >>> many_times(9.7), many_times(3.25)
    ('10 times', '3.2 times')
    """
    return f"{factor:.0f} times" if factor >= 9.5 else f"{factor:.1f} times"


def ranks_of(ranks: Iterable[int]) -> str:
    """Runs of ranks together.

    >>> ranks_of([3]), ranks_of([0, 1, 2, 5])
    ('rank 3', 'ranks 0 to 2, 5')
    """
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = [
        str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" if len(run) > 2 else f"{run[0]}, {run[1]}" for run in runs
    ]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(told)}"
