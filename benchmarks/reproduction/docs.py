"""The tables of ``docs/reproduction.md``: the cells that the commands printed, between two comments each.

    <!-- table slow_worker 0 -->
    | … |
    <!-- end -->

python -m benchmarks.reproduction.docs    # after a run: puts the last run's tables there; the prose is by hand
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import ROOT, console
from benchmarks.reproduction.report import FOLDER

PAGE = ROOT / "docs" / "reproduction.md"
_BLOCK = re.compile(r"(<!-- table (?P<name>\w+) (?P<number>\d+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def markdown(table: dict[str, Any]) -> str:
    """A table with its title and caption."""
    head = [table["columns"], ["---", *["---:"] * (len(table["columns"]) - 1)]]
    caption = f"\n{table['caption']}\n" if table["caption"] else ""
    return f"**{table['title']}**\n\n" + "\n".join(line(row) for row in [*head, *table["rows"]]) + f"\n{caption}"


def with_tables(text: str) -> str:
    """The page with the tables of the last run of each headline."""

    def filled(block: re.Match[str]) -> str:
        tables = json.loads((FOLDER / f"{block['name']}.json").read_text())["tables"]
        return block[1] + markdown(tables[int(block["number"])]) + block[5]

    return _BLOCK.sub(filled, text)


def tables_in(text: str) -> list[tuple[str, int]]:
    """Which tables a page has: headline and number."""
    return [(block["name"], int(block["number"])) for block in _BLOCK.finditer(text)]


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text()))
    console.print(f"{len(tables_in(PAGE.read_text()))} tables in {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
