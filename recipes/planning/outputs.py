"""What a plan leaves: a table, a recommendation in words, plan.json, and plan.yaml to train."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_gossip.analysis.planning.dynamics import WORTH
from lightning_gossip.simulation import ADPSGD, APSGD, Strategy
from recipes.planning.choice import MOST_APART, Candidate, gap
from recipes.planning.choices import Choices
from recipes.planning.known import Known

_WIDTH = 110  # of the table in any case: a narrow terminal breaks its lines, but no number loses its digits
_HEADINGS = ("n", "/s", "wait", "exch", "stale", "margin", "time", "lr ≤", "best", "apart", "time")
_SURE_H, _SURE_S = 1.5, 2.0  # factors by which curvature and noise may be others than measured
_FEW = 0.5  # exchanges a step: with fewer a sentence says so

IDEALISED = (
    "What this idealises: a quadratic loss with the curvature and the noise of one point of training, a constant learning rate,"
    " the same data on all workers, SGD, no error of quantization, no validation. Ratios are what it is for, not seconds."
)


def table(candidates: Sequence[Candidate], known: Known, now: Candidate) -> Table:
    """Every candidate a row."""
    title = f"Predicted; h_max = {known.curvature.largest:.3g}, {known.curvature.source}; noise {known.noise_source}"
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    made.add_column("strategy", no_wrap=True)
    for heading in _HEADINGS:
        made.add_column(heading, justify="right", no_wrap=True)
    for one in candidates:
        seen = one.times.staleness
        stale = f"{seen.mean:.1f}/{seen.quantile(0.95)}" if seen.count else "–"
        made.add_row(
            one.name,
            str(one.workers),
            f"{one.times.samples_per_s:.0f}",
            f"{one.times.waiting:.0%}",
            _two(one.times.exchanges_per_step) if one.times.exchanges_per_step else "–",
            stale,
            _two(one.margin),
            _seconds(one.time_s),
            _two(one.bound),
            _two(one.best_lr),
            f"{one.share_apart:.0%}",
            _seconds(one.best_time_s),
            style="bold" if (one.name, one.workers) == (now.name, now.workers) else None,
        )
    return made


def note(now: Candidate) -> str:
    """What the table's columns are."""
    return (
        "/s: samples a second; exch: exchanges of a worker per step that there is time for; stale: mean staleness, 95 %\n"
        f"with the present lr ({now.lr:.3g} of {now.workers} workers, in proportion for others):\n"
        "  margin: largest stable lr over it;\n"
        f"  time: seconds until the excess of the loss has fallen to {now.target:g} of itself\n"
        f"lr ≤: for a margin of {now.least_margin:g}; best: the soonest of these, not above the present one; with that\n"
        f"  apart: share of a worker's loss due to its distance to the mean model (at most {MOST_APART:.0%}), and time\n"
        "bold: the present setting\n"
    )


def setting(best: Candidate, known: Known) -> dict[str, Any]:
    """Dotted key → value of what is recommended."""
    value = known.lr.value if known.adaptive else known.lr.value_for(best.best_lr, best.workers)
    values: dict[str, Any] = {**_devices(best.workers, known), known.lr.key: float(f"{value:.4g}")}
    strategy = best.strategy
    if isinstance(strategy, APSGD):
        values["strategy.active_workers"] = strategy.active_workers
        values["strategy.max_staleness"] = strategy.max_staleness
        values["strategy.on_stale"] = strategy.on_stale
    if isinstance(strategy, ADPSGD):
        values["strategy.exchanges_per_step"] = strategy.exchanges_per_step
        values["strategy.push_every"] = strategy.push_every
        if strategy.local_steps is not None:
            values["strategy.local_steps"] = strategy.local_steps
        if strategy.island != 1:
            values["strategy.island"] = strategy.island
    outer = getattr(strategy, "outer", None)
    if outer is not None:
        values["strategy.outer"] = {"_target_": "lightning_gossip.Outer", **asdict(outer)}
    return values


def _devices(workers: int, known: Known) -> dict[str, int]:
    """As many nodes as the workers fill."""
    size = known.machines.node_size
    if size is None or workers <= size:
        return {"trainer.devices": workers} if size is None else {"trainer.devices": workers, "trainer.num_nodes": 1}
    return {"trainer.devices": size, "trainer.num_nodes": workers // size}


def choices_for(best: Candidate, known: Known, present: Choices) -> Choices:
    """The present choices with the recommended ones in their place."""
    groups, values = dict(present.groups), dict(present.values)
    if best.name != known.strategy.name:
        chosen = present.of_strategy(best.name)
        groups, values = dict(chosen.groups), dict(chosen.values)
    if isinstance(best.strategy, ADPSGD) and isinstance(best.strategy.topology, str):
        groups["topology"] = best.strategy.topology
        values = {key: value for key, value in values.items() if key not in ("strategy.topology", "topology.name")}
    return Choices(groups, {**values, **setting(best, known)})


def words(best: Candidate, now: Candidate, known: Known) -> str:
    """The recommendation in sentences."""
    strategy, parts = best.strategy, [f"Train with {best.name} on {best.workers} worker{'s' if best.workers > 1 else ''}"]
    if isinstance(strategy, APSGD) and best.workers > 1:
        active = strategy.active_workers or best.workers
        bound = strategy.max_staleness
        parts.append(f", {active} of them active, " + ("no staleness bound" if bound is None else f"staleness ≤ {bound}"))
    if isinstance(strategy, ADPSGD) and best.workers > 1:
        edges = gap(strategy, best.workers)
        graph = f"{strategy.graph_name(best.workers)} (spectral gap {edges:.3g})"
        reached = _two(best.times.exchanges_per_step)
        parts.append(f" on the graph {graph}, {reached} exchange(s) a step of {strategy.exchanges_per_step:g} asked for")
    parts.append(_other_options(best))
    value = known.lr.value_for(best.best_lr, best.workers)
    bound_value = known.lr.value_for(best.bound, best.workers)
    if known.adaptive:
        parts.append(
            f". The recipe's optimizer is adaptive, and the rules are of SGD: {known.lr.key} stays {known.lr.value:.4g}, and"
            " of what is predicted only samples/s is to be relied on. "
        )
    else:
        parts.append(f", and {known.lr.key}={value:.4g} (at most {bound_value:.3g} for a margin of {best.least_margin:g}). ")
    same = setting(best, known) == setting_now(now, known) and best.strategy == now.strategy
    if same:
        parts.append("That is the present setting: nothing that was tried is predicted to be faster by more than 5 %.")
    elif now.lr >= now.dynamics.limit:
        parts.append(f"The present setting is predicted to diverge: its margin is {_two(now.margin)}.")
    elif now.trains_apart:
        parts.append("The present setting is predicted to train its workers' models apart: they are averaged too seldom.")
    elif math.isinf(now.time_s):
        parts.append("The present setting is predicted never to reach the target: the gradients' noise keeps it above.")
        if known.run is not None and known.loss_is_known and known.run.reached(now.target * known.noise.loss):
            parts.append(f" Its run has: with a margin of {_two(now.margin)} a little less noise than measured is enough.")
    else:
        parts.append(
            f"Predicted: {_seconds(best.best_time_s)} s to the target in place of {_seconds(now.time_s)} s,"
            f" {_gain(best, now)}; margin {_two(best.dynamics.margin(best.best_lr))} in place of"
            f" {_two(now.margin)}; {best.times.samples_per_s:.0f} samples/s in place of {now.times.samples_per_s:.0f}."
        )
    parts.append(_apart(best, known))
    return "".join(parts)


def _other_options(best: Candidate) -> str:
    """Islands, rounds and rarer pushes, where there are any."""
    strategy, said = best.strategy, ""
    if isinstance(strategy, ADPSGD):
        if strategy.island != 1:
            said += f", in islands of {strategy.island} that train together"
        if strategy.push_every > 1:
            said += f", a push in {strategy.push_every} steps"
    outer = getattr(strategy, "outer", None)
    if outer is not None:
        rounds = f"{strategy.local_steps} steps" if isinstance(strategy, ADPSGD) else "each average"
        said += f", an outer step after {rounds} (lr {outer.lr:g}, momentum {outer.momentum:g})"
    return said


def _apart(best: Candidate, known: Known) -> str:
    """How far the recommended setting's models are from each other, where there is something to say."""
    if best.share_apart < 0.01 or known.adaptive:
        return ""
    distance = best.consensus_distance
    in_numbers = "" if distance is None or not known.loss_is_known else f" (a consensus distance of {distance:.2g})"
    said = (
        f" At the target {best.share_apart:.0%} of a worker's own loss comes from its distance to the mean model{in_numbers}."
    )
    adopts = getattr(best.strategy, "at_rendezvous", "adopt") == "adopt"
    if isinstance(best.strategy, ADPSGD) and best.times.exchanges_per_step < _FEW and adopts:
        steps = known.machines.epoch_steps(best.workers)
        said += f" With so few exchanges the average at each epoch's end, every {steps} steps, is what keeps models together."
    return said


def _gain(best: Candidate, now: Candidate) -> str:
    """How many times as fast, and between what and what if curvature and noise are others than those that were measured."""
    factors = itertools.product((1 / _SURE_H, 1.0, _SURE_H), (1 / _SURE_S, 1.0, _SURE_S))
    known = [gain for curvature, noise in factors if (gain := _ratio(best, now, curvature, noise)) is not None]
    low, high = min(known), max(known)
    whole = f"{_two(now.time_s / best.best_time_s)} times as fast"
    if _two(low) == _two(high):
        return whole
    bounds = f"at least {_two(low)}" if math.isinf(high) else f"{_two(low)} to {_two(high)}"
    if low == 0.0:
        bounds = f"at most {_two(high)}, or never at the target" if math.isfinite(high) else "anything"
    return f"{whole} ({bounds}, if the curvature is up to {_SURE_H:g} and the noise up to {_SURE_S:g} times higher or lower)"


def _ratio(best: Candidate, now: Candidate, curvature: float, noise: float) -> float | None:
    """The present setting's time over the recommended one's, with another loss; None if neither gets there."""
    before, after = (
        one.dynamics.varied(curvature=curvature, noise=noise).time_s(lr, one.target)
        for one, lr in ((now, now.lr), (best, best.best_lr))
    )
    if math.isinf(after):
        return None if math.isinf(before) else 0.0
    return before / after


def more_workers(candidates: Sequence[Candidate], best: Candidate) -> str:
    """What more workers than are recommended would gain, and no more of them than are needed; empty if nothing."""
    more = [one for one in candidates if one.workers > best.workers and one.best_time_s * WORTH < best.best_time_s]
    if not more:
        return ""
    least_s = min(one.best_time_s for one in more)
    soonest = min((one for one in more if one.best_time_s <= WORTH * least_s), key=lambda one: (one.workers, one.best_time_s))
    return f" More workers: {soonest.name} on {soonest.workers} is predicted to take {_seconds(soonest.best_time_s)} s."


def setting_now(now: Candidate, known: Known) -> dict[str, Any]:
    """The present setting as keys of a configuration, with values."""
    values = setting(now, known)
    values[known.lr.key] = float(f"{known.lr.value:.4g}")
    return values


def measured(known: Known, now: Candidate) -> str | None:
    """How well the simulator's times are those of the run."""
    if known.run is None or now.name != known.run.summary["strategy"]:
        return None
    speed, stale = known.run.summary["samples_per_s"], known.run.staleness
    return (
        f"Measured: {speed:.0f} samples/s, validation included, and a mean staleness of {stale:.2f}; simulated from its step"
        f" times: {now.times.samples_per_s:.0f} and {now.times.staleness.mean:.2f}."
    )


def as_json(candidates: Sequence[Candidate], best: Candidate, now: Candidate, known: Known, curves: Mapping[str, Any]) -> Any:
    """Everything, for programs; what is infinite is null."""
    return {
        "target": now.target,
        "margin": now.least_margin,
        "curvature": {"eigenvalues": list(known.curvature.eigenvalues), "source": known.curvature.source},
        "noise": {**asdict(known.noise), "source": known.noise_source},
        "measured": None if known.run is None else {"folder": str(known.run.folder), "staleness_mean": known.run.staleness},
        "momentum": known.momentum,
        "nesterov": known.nesterov,
        "links": _links(known),
        "now": _row(now),
        "recommended": {**_row(best), "setting": setting(best, known)},
        "recommendation": words(best, now, known),
        "idealised": IDEALISED,
        "candidates": [_row(one) for one in candidates],
        "curves": curves,
    }


def _links(known: Known) -> dict[str, Any]:
    links = known.machines.links
    found: dict[str, Any] = {"latency_s": links.latency_s, "bandwidth": _finite(links.bandwidth)}
    if links.nodes is not None:
        found["nodes"] = list(links.nodes.sizes)
    return found


def save(plan: Any, folder: Path) -> None:
    """Write plan.json."""
    (folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")


def show(text: str, made: Table, below: str, console: Console) -> None:
    """Print the table, what its columns are, and the recommendation."""
    width, console.width = console.width, max(console.width, _WIDTH)
    console.print(made)
    console.width = width
    console.print(below, soft_wrap=True, highlight=False)
    console.print(text, soft_wrap=True)


def _row(one: Candidate) -> dict[str, Any]:
    return {
        "strategy": one.name,
        "options": _options(one.strategy),
        "workers": one.workers,
        "samples_per_s": one.times.samples_per_s,
        "waiting": one.times.waiting,
        "exchanges_per_step": one.times.exchanges_per_step,
        "staleness_mean": one.times.staleness.mean if one.times.staleness.count else None,
        "staleness_p95": one.times.staleness.quantile(0.95) if one.times.staleness.count else None,
        "dropped": one.times.dropped,
        "spectral_gap": gap(one.strategy, one.workers),
        "lr": one.lr,
        "margin": one.margin,
        "decay_per_s": _finite(one.dynamics.decay(one.lr)),
        "time_s": _finite(one.time_s),
        "lr_limit": one.dynamics.limit,
        "lr_bound": one.bound,
        "best_lr": one.best_lr,
        "best_time_s": _finite(one.best_time_s),
        "share_apart": one.share_apart,
        "consensus_distance": None if one.consensus_distance is None else _finite(one.consensus_distance),
        "floor": _finite(one.floor),
    }


def _options(strategy: Strategy) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None))
    options = {key: value for key, value in vars(strategy).items() if isinstance(value, plain)}
    outer = getattr(strategy, "outer", None)
    return options if outer is None else {**options, "outer": asdict(outer)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else _two(value)


def _two(value: float) -> str:
    """With two digits, and without an exponent."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:.0f}" if abs(rounded) >= 10.0 else f"{rounded:g}"
