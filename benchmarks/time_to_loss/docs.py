"""The tables of ``docs/time-to-loss.md``, between two comments each: task, hosts, Mb/s, scenario.

    <!-- time_to_loss char_gpt 4 200 equal -->
    | … |
    <!-- end -->

python -m benchmarks.time_to_loss.docs    # after runs: puts the present ones there; the prose is by hand
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from benchmarks.harness import RESULTS, ROOT, console
from benchmarks.reproduction.docs import line
from benchmarks.time_to_loss.report import COLUMNS, cells, targets
from benchmarks.time_to_loss.results import Results
from benchmarks.time_to_loss.task import Condition
from benchmarks.time_to_loss.tasks import TASKS

PAGE = ROOT / "docs" / "time-to-loss.md"
_BLOCK = re.compile(r"(<!-- time_to_loss (\w+) (\d+) (\d+) (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(text: str, results: Mapping[str, Results]) -> str:
    """The page with the tables of these runs, by the name of their task."""

    def filled(block: re.Match[str]) -> str:
        found, condition = results[block[2]], Condition(int(block[3]), float(block[4]), block[5])
        target = targets(found, condition.hosts)
        assert target is not None, "DDP has fewer than two seeds"
        head = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)]]
        return block[1] + "\n".join(line(row) for row in [*head, *cells(found, condition, target)]) + "\n" + block[7]

    return _BLOCK.sub(filled, text)


def kept() -> dict[str, Results]:
    """The runs of all tasks."""
    return {name: Results(RESULTS / f"{task.file}.json", None) for name, task in TASKS.items()}


def main() -> None:
    page = with_tables(PAGE.read_text(), kept())
    PAGE.write_text(page)
    console.print(f"{len(_BLOCK.findall(page))} tables in {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
