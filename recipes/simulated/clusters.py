"""A configuration's machines, as the simulator has them: workers, links, nodes; or those of a cluster.json."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.callbacks import ClusterEmulator
from lightning_gossip.simulation import Cluster, ClusterFile, Law, Links, Nodes, Samples, SlowPeriod, make_law

_OF_THE_FILE = ("trainer.devices", "trainer.num_nodes", "links", "trainer")


def workers_of(cfg: DictConfig) -> int:
    """The number of workers: those of ``cluster_file``, or devices × nodes.

    Raises:
        ConfigurationError: naming the key.
    """
    if cfg.cluster_file is not None:
        return ClusterFile.load(Path(cfg.cluster_file)).workers
    check_integer("trainer.devices", cfg.trainer.devices, example=16)
    check_integer("trainer.num_nodes", cfg.trainer.num_nodes, example=1)
    return int(cfg.trainer.devices * cfg.trainer.num_nodes)


def take_over_file(cfg: DictConfig, given: Sequence[str]) -> None:
    """Put the number of workers of ``cluster_file`` where the rest of a configuration has it.

    Args:
        cfg: changed.
        given: overrides that the call was made with.

    Raises:
        ConfigurationError: for a file that cannot be read, or another number of workers or other links beside it.
    """
    if cfg.cluster_file is None:
        return
    for override in given:
        key = re.split(r"=", override.lstrip("+~"))[0]
        if key in _OF_THE_FILE[:3] or key.startswith("links."):
            raise ConfigurationError(
                f"{override} is beside cluster_file={cfg.cluster_file}, which says that: leave one of them out."
            )
    sizes = ClusterFile.load(Path(cfg.cluster_file)).sizes
    equal = len(set(sizes)) == 1
    cfg.trainer.devices, cfg.trainer.num_nodes = (sizes[0], len(sizes)) if equal else (sum(sizes), 1)


def cluster_of(cfg: DictConfig) -> Cluster:
    """The workers.

    Raises:
        ConfigurationError: naming the key.
    """
    workers = workers_of(cfg)
    emulator = _emulator(cfg, workers)
    common: dict[str, Any] = {
        "slowdown": {} if emulator is None else dict(emulator.slowdown),
        "failures": dict(cfg.failures or {}),
        "slow_periods": _slow_periods(cfg),
    }
    if cfg.compute.backward_share is not None:
        common["backward_share"] = cfg.compute.backward_share
    if cfg.compute.record is not None:
        cluster = Cluster.measured(_record(Path(cfg.compute.record)), **common)
        if cluster.workers != workers:
            raise ConfigurationError(
                f"compute.record={cfg.compute.record} is of {cluster.workers} workers and trainer.devices says {workers}."
            )
        return cluster
    if cfg.compute.get("trace") is not None:
        return Cluster(workers, trace(Path(cfg.compute.trace), workers), **common)
    measured = None if cfg.cluster_file is None else ClusterFile.load(Path(cfg.cluster_file)).laws()
    return Cluster(workers, _law(cfg, emulator) if measured is None else measured, **common)


def links_of(cfg: DictConfig) -> Links:
    """Between the workers: with ``trainer.num_nodes`` above 1 those of a node share its card, whatever the links are.

    Raises:
        ConfigurationError: naming the key.
    """
    if cfg.cluster_file is not None:
        return ClusterFile.load(Path(cfg.cluster_file)).links()
    options: dict[str, Any] = OmegaConf.to_container(cfg.links, resolve=True)  # type: ignore[assignment]
    slow, all_reduce = _slow(options.pop("slow", None), "links.slow"), options.pop("all_reduce", "auto")
    nodes = _nodes(cfg, options.pop("nodes", None))
    made: Links = instantiate(options)
    return replace(made, slow={**made.slow, **slow}, all_reduce=all_reduce, nodes=nodes)


def _nodes(cfg: DictConfig, options: dict[str, Any] | None) -> Nodes | None:
    if options is not None:
        made: Nodes = instantiate({**options, "slow": None})
        return replace(made, slow=_slow(options.get("slow"), "links.nodes.slow"))
    return Nodes.equal(cfg.trainer.num_nodes, cfg.trainer.devices) if cfg.trainer.num_nodes > 1 else None


def _emulator(cfg: DictConfig, workers: int) -> ClusterEmulator | None:
    if "nodes" in cfg.cluster:  # conf/cluster/nodes_*: it has set trainer and links
        return None
    emulator: ClusterEmulator | None = instantiate(cfg.cluster) or None
    if emulator is not None:
        emulator.check(workers)
    return emulator


def _slow_periods(cfg: DictConfig) -> list[SlowPeriod]:
    given = OmegaConf.to_container(cfg.slow_periods) if OmegaConf.is_config(cfg.slow_periods) else cfg.slow_periods
    if given is None:
        return []
    needed = {field.name for field in fields(SlowPeriod)}
    if not isinstance(given, list) or any(not isinstance(period, dict) or set(period) != needed for period in given):
        raise ConfigurationError(
            f"slow_periods={given!r} is not a list of a rank, its time and its factor each. Write for example"
            " slow_periods=[{rank:3,from_s:2,until_s:8,factor:4}]."
        )
    return [SlowPeriod(**period) for period in given]


def _record(path: Path) -> Any:
    path = path / "record.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"compute.record={path} cannot be read ({error}). Write the folder of a training run, or its record.json."
        ) from error


def trace(path: Path, workers: int) -> Law | list[Law]:
    """Step times from a CSV file with a column ``step_s``.

    With a column ``rank`` each worker has its own, one after the other and then from the first again; without one all draw from
    them at random.

    Args:
        path: of the file.
        workers: how many there are.

    Raises:
        ConfigurationError: naming the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"compute.trace={path} cannot be read ({error}). Write the path of a CSV file.") from error
    if not rows or "step_s" not in rows[0]:
        raise ConfigurationError(
            f"compute.trace={path} has no column step_s with times below it. Write a head of rank,step_s, and a line a step."
        )
    times_s: dict[int, list[float]] = {}
    for line, row in enumerate(rows, start=2):
        try:
            rank, time_s = int(row.get("rank") or 0), float(row["step_s"])
        except (TypeError, ValueError):
            rank, time_s = -1, math.nan
        if rank not in range(workers) or not 0.0 < time_s < math.inf:
            raise ConfigurationError(
                f"compute.trace={path}, line {line}: {dict(row)} is not a step time in seconds above 0 of a rank from 0 to"
                f" {workers - 1}."
            )
        times_s.setdefault(rank, []).append(time_s)
    if "rank" not in rows[0]:
        return Samples(times_s[0])
    missing = [rank for rank in range(workers) if rank not in times_s]
    if missing:
        raise ConfigurationError(f"compute.trace={path} has no step of the ranks {missing}: each worker needs at least one.")
    return [Samples(times_s[rank], order="given") for rank in range(workers)]


def _law(cfg: DictConfig, emulator: ClusterEmulator | None) -> Law:
    """Of a batch's compute time; the emulator of a training run has the last word."""
    mean_s, name, options = cfg.compute.mean_s, cfg.compute.law, dict(cfg.compute.options or {})
    if emulator is not None:
        mean_s = mean_s if emulator.period_s is None else emulator.period_s
        if emulator.jitter is not None:
            name, options = emulator.jitter, {"spread": emulator.spread}
    if name == "samples":
        if "times_s" not in options:
            raise ConfigurationError(
                "compute.law=samples needs the times: write compute.options={times_s: [0.1, 0.12]}, or compute.record=FOLDER of"
                " a training run for each worker's own."
            )
        return make_law(name, **{**options, "times_s": list(options["times_s"])})
    return make_law(name, mean_s=mean_s, **options)


def _slow(slow: Any, name: str) -> Mapping[int | tuple[int, int], float]:
    """A slow link between 0 and 3 is written "0-3", since a mapping's key cannot be a pair there."""
    slow = slow or {}
    if not isinstance(slow, dict):
        raise ConfigurationError(f"{name}={slow!r} is not a mapping. Write for example {name}={{0-3: 10}}.")
    return {_ends_of(key, name): factor for key, factor in slow.items()}


def _ends_of(key: object, name: str) -> int | tuple[int, int]:
    try:
        ends = [int(end) for end in str(key).split("-")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        of = "node" if "nodes" in name else "rank"
        raise ConfigurationError(
            f"{name} names {key!r}, which is neither a {of} nor a pair of {of}s. Write for example {name}={{0-3: 10}}."
        )
    return ends[0] if len(ends) == 1 else (ends[0], ends[1])
