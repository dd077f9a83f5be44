"""All ordered pairs of workers as a matrix, for tables and pictures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_gossip.doctor.report import Link, Report


def matrix(report: Report, value: Callable[[Link], tuple[float | None, float | None]]) -> NDArray[np.float64]:
    """A value for each ordered pair of workers, NaN where nothing is known.

    Args:
        report: of the visit.
        value: of a link: from i to j, and from j to i.

    Returns:
        Shape (n, n): row from, column to.
    """
    values = np.full((report.world_size, report.world_size), np.nan)
    for link in report.links:
        there, back = value(link)
        for one, other, known in ((link.i, link.j, there), (link.j, link.i, back)):
            if known is not None:
                values[one, other] = known
    return values
