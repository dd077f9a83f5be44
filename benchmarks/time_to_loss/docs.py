"""The tables of ``docs/performance.md``, between two comments each: hosts, Mb/s, scenario.

    <!-- time_to_loss 4 200 equal -->
    | … |
    <!-- end -->

python -m benchmarks.time_to_loss.docs    # after runs: puts the present ones there; the prose is by hand
"""

from __future__ import annotations

import re

from benchmarks.harness import RESULTS, ROOT, console
from benchmarks.reproduction.docs import line
from benchmarks.time_to_loss.report import COLUMNS, cells, targets
from benchmarks.time_to_loss.results import Results
from benchmarks.time_to_loss.task import Condition

PAGE = ROOT / "docs" / "performance.md"
_BLOCK = re.compile(r"(<!-- time_to_loss (\d+) (\d+) (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(text: str, results: Results) -> str:
    """The page with the tables of these runs."""

    def filled(block: re.Match[str]) -> str:
        condition = Condition(int(block[2]), float(block[3]), block[4])
        target = targets(results, condition.hosts)
        assert target is not None, "DDP has fewer than two seeds"
        head = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)]]
        return block[1] + "\n".join(line(row) for row in [*head, *cells(results, condition, target)]) + "\n" + block[6]

    return _BLOCK.sub(filled, text)


def main() -> None:
    page = with_tables(PAGE.read_text(), Results(RESULTS / "time_to_loss.json", None))
    PAGE.write_text(page)
    console.print(f"{len(_BLOCK.findall(page))} tables in {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
