"""A heat map of all pairs, where matplotlib is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_gossip.doctor.matrices import matrix
from lightning_gossip.doctor.report import Report

FIGURE = "links.png"
_NAMED = 32  # workers whose numbers fit beside a picture
_WRITTEN = 8  # workers whose values fit into it
_LEAST = 10.0  # from the darkest colour to the lightest: what differs by less looks alike


def draw(report: Report, path: Path) -> bool:
    """Draw bandwidth and latency of all pairs, on logarithmic scales.

    Args:
        report: of the visit.
        path: of the PNG file.

    Returns:
        Whether there was something to draw and to draw with.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rates = matrix(report, lambda link: (link.there, link.back)) / 1e6
    latencies = matrix(report, lambda link: (link.latency_s, link.latency_s)) * 1e3
    if np.isnan(rates).all() and np.isnan(latencies).all():
        return False
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    parts = ((rates, "bandwidth, MB/s", "viridis"), (latencies, "latency, ms", "viridis_r"))
    for place, (values, title, colours) in enumerate(parts, start=1):
        axes = figure.add_subplot(1, 2, place)
        axes.set_facecolor("lightgrey")
        known = values[~np.isnan(values)]
        if known.size:
            low, high = float(known.min()), float(known.max())
            wide = (min(low, high / _LEAST), high) if values is rates else (low, max(high, low * _LEAST))
            image = axes.imshow(values, cmap=colours, norm=LogNorm(*wide))
            figure.colorbar(image, ax=axes, shrink=0.8)
        if report.world_size <= _WRITTEN:
            for (row, column), value in np.ndenumerate(values):
                if not np.isnan(value):
                    style = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1.5}
                    axes.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=9, bbox=style)
        for link in report.links:
            for row, column in ((link.i, link.j), (link.j, link.i)):
                if link.failed and np.isnan(values[row, column]):
                    axes.text(column, row, "×", ha="center", va="center", color="red")
        if report.world_size <= _NAMED:
            axes.set_xticks(range(report.world_size))
            axes.set_yticks(range(report.world_size))
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
        axes.set_title(title)
    figure.savefig(path, dpi=110)
    return True
