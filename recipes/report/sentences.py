"""What was run, and what came out, in sentences computed from the runs."""

from __future__ import annotations

from recipes.report.groups import Group
from recipes.report.ranking import Ranking, Row
from recipes.report.runs import Job
from recipes.report.units import Unit, count, listed, percent, points, times


def what_was_run(groups: list[Group]) -> str:
    """Recipe, workers, epochs, groups, seeds and date."""
    jobs = [job for group in groups for job in group.jobs]
    recipes = list(dict.fromkeys(job.options["recipe"] for job in jobs))
    workers = sorted({job.summary["world_size"] for job in jobs})
    epochs = sorted({job.summary["epochs"] for job in jobs})
    strategies = list(dict.fromkeys(job.options["strategy"] for job in jobs))
    seeds = sorted({len(group.jobs) for group in groups})
    each = f"{seeds[0]}–{seeds[-1]} runs" if seeds[0] != seeds[-1] else count(seeds[0], "run")
    noun = "strategy" if len(strategies) == 1 else "strategies"
    settings = "" if len(groups) == len(strategies) else f", in {count(len(groups), 'setting')}"
    apart = "" if seeds[-1] == 1 else " that differ in their seed alone"
    return (
        f"The {'recipe' if len(recipes) == 1 else 'recipes'} {listed(recipes)} trained for {_numbers(epochs, 'epoch')} "
        f"on {_numbers(workers, 'worker')} with the {noun} {listed(strategies)}{settings}: {each} of each{apart}, "
        f"{count(len(jobs), 'run')} in all, finished {_when(jobs)}."
    )


def headline(ranking: Ranking, unit: Unit) -> str:
    """Who was first at the target, what that did to the test accuracy, and whose that is highest.

    Args:
        ranking: of one recipe.
        unit: for times.
    """
    best = ranking.rows[0]
    if len(ranking.rows) == 1:
        return _single(best, ranking, unit)
    if ranking.target is None or best.reached is None:
        return _by_accuracy(ranking, unit)
    goal = f"{percent(ranking.target, 0)} validation accuracy"
    first = f"{best.group.label} was the first to reach {goal}, after {unit.text(best.reached)}"
    if best.is_baseline:
        second = next((row for row in ranking.rows[1:] if row.reached is not None), None)
        if second is None:
            return f"{first}; it is the baseline, and no other reached it with every seed. {_highest(ranking)}".rstrip()
        next_came = f"{second.group.label} came next, after {unit.text(second.reached)}"
        said = f"{first}; it is the baseline. {next_came}. {_quality(second)}"
    elif best.speedup_to_target is None:
        said = f"{first}; the baseline {best.baseline.label} did not reach it with every seed. {_quality(best)}"
    else:
        ratio = times(best.speedup_to_target).removesuffix("×").strip()
        than = f"the baseline {best.baseline.label}{_overlap(best, ranking, unit)}"
        said = f"{first}: {ratio} times as fast as {than}. {_quality(best)}"
    return f"{said} {_highest(ranking)}".rstrip()


def _highest(ranking: Ranking) -> str:
    """Said where the fastest is not the best."""
    best = max(ranking.rows, key=lambda row: row.group.mean("test_acc") or 0.0)
    highest, first = (percent(row.group.mean("test_acc"), 2) for row in (best, ranking.rows[0]))
    return "" if highest == first else f"The highest test accuracy, {highest}, is that of {best.group.label}."


def _single(row: Row, ranking: Ranking, unit: Unit) -> str:
    group = row.group
    when = f", and {percent(ranking.target, 0)} validation accuracy after {unit.text(row.reached)}" if row.reached else ""
    accuracy = percent(group.mean("test_acc"), 2)
    return (
        f"{group.label} reached {accuracy} test accuracy in {unit.text(group.mean('train_s'))}{when}. "
        "There is nothing to compare it with on this page."
    )


def _by_accuracy(ranking: Ranking, unit: Unit) -> str:
    best = max(ranking.rows, key=lambda row: row.group.mean("test_acc") or 0.0)
    fastest = min(ranking.rows, key=lambda row: row.group.mean("train_s") or 0.0)
    why = "" if ranking.target is None else f"None reached {percent(ranking.target, 0)} validation accuracy with every seed. "
    return (
        f"{why}{best.group.label} has the highest test accuracy, {percent(best.group.mean('test_acc'), 2)}; "
        f"{fastest.group.label} took the least time for its epochs, {unit.text(fastest.group.mean('train_s'))}."
    )


def _quality(row: Row) -> str:
    own, theirs = row.group.values("test_acc"), row.baseline.values("test_acc")
    accuracy, baseline = percent(row.group.mean("test_acc"), 2), percent(row.baseline.mean("test_acc"), 2)
    distance = points(abs(row.difference)).lstrip("+")
    if distance == "0":
        return f"Its test accuracy is that of {row.baseline.label}, {accuracy}."
    side = "above" if row.difference > 0 else "below"
    compared = f"Its test accuracy of {accuracy} is {distance} points {side} the {baseline} of {row.baseline.label}"
    if len(own) < 2 or len(theirs) < 2:
        return f"{compared}; without several seeds of both, that may be chance."
    overlap = min(own) <= max(theirs) and min(theirs) <= max(own)
    return f"{compared}, {'which is within' if overlap else 'more than'} the spread of the seeds."


def _overlap(row: Row, ranking: Ranking, unit: Unit) -> str:
    """Said where a slow seed of the faster is behind a fast seed of the slower."""
    own, theirs = row.reached_s, next(other.reached_s for other in ranking.rows if other.group is row.baseline)
    slowest, fastest = max(filter(None, own)), min(filter(None, theirs))
    if slowest < fastest:
        return ""
    return f" in the mean, though its slowest run took {unit.text(slowest)} and the baseline's fastest {unit.text(fastest)}"


def _numbers(values: list[int], noun: str) -> str:
    return count(values[0], noun) if len(values) == 1 else f"{listed(map(str, values))} {noun}s"


def _when(jobs: list[Job]) -> str:
    first, last = min(job.ended for job in jobs), max(job.ended for job in jobs)
    day = f"{first.day} {first:%B %Y}"
    if first.date() != last.date():
        return f"between {day} and {last.day} {last:%B %Y}"
    return f"on {day}" if f"{first:%H:%M}" == f"{last:%H:%M}" else f"on {day} between {first:%H:%M} and {last:%H:%M}"
