"""What the pictures of a page share; a group has one colour in all of them."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from recipes.report.groups import COLOURS, DASHES, Group

# Vega's ten, from which the colours of recipes.plots are too
_COLOURS = (
    *("#4C78A8", "#F58518", "#54A24B", "#E45756", "#B279A2"),
    *("#72B7B2", "#9D755D", "#EECA3B", "#FF9DA6", "#79706E"),
)
_DASHES = ("-", "--", ":", "-.")
assert (len(_COLOURS), len(_DASHES)) == (COLOURS, DASHES)
WIDTH = 6.4  # inches


@dataclass(frozen=True)
class Picture:
    """A figure and what is said of it.

    Args:
        name: of its file.
        title: above it.
        caption: below it: what one sees, and where it comes from.
        alt: what it shows, for those who cannot see it.
        figure: itself.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


def colour(group: Group) -> str:
    """Of its lines and bars."""
    return _COLOURS[group.colour % COLOURS]


def dash(group: Group) -> str:
    """Of its lines."""
    return _DASHES[group.dash % DASHES]


def safe(label: str) -> str:
    """Nothing in it is mathematics to matplotlib."""
    return label.replace("$", r"\$")
