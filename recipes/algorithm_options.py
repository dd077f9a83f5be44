"""What an algorithm is told, looked at by its own class of options and without PyTorch: before a command imports that.

The classes are in ``lightning_gossip.algorithm``, pure; a strategy makes one of them from its arguments, and this the same one
from the configuration. What else a strategy has (processes, checkpoints) is in :mod:`recipes.ranges`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_gossip.algorithm.checks import is_integer
from lightning_gossip.errors import ConfigurationError

_ALGORITHM = "lightning_gossip.algorithm"
_OF_STRATEGY = {  # by the target of the configuration
    "lightning_gossip.ADPSGDStrategy": ("adpsgd.options", "GossipOptions"),
    "lightning_gossip.APSGDStrategy": ("apsgd.options", "APSGDOptions"),
    "lightning_gossip.DPSGDStrategy": ("dpsgd", "NeighbourOptions"),
    "lightning_gossip.EAMSGDStrategy": ("eamsgd_options", "EAMSGDOptions"),
    "lightning_gossip.PeriodicAveragingStrategy": ("periodic_averaging.protocol", "AveragingOptions"),
    "lightning_gossip.QSGDStrategy": ("options", "EpochEndOptions"),
    "lightning_gossip.ShardedADPSGDStrategy": ("adpsgd.options", "GossipOptions"),
}
_OBJECTS = {  # that options hold
    "lightning_gossip.Outer": ("outer", "Outer"),
    "lightning_gossip.algorithm.AdaptivePeriod": ("periodic_averaging.adaptive_period", "AdaptivePeriod"),
    "lightning_gossip.algorithm.ConstantPeriod": ("periodic_averaging.period", "ConstantPeriod"),
    "lightning_gossip.algorithm.PiecewisePeriod": ("periodic_averaging.piecewise_period", "PiecewisePeriod"),
    "lightning_gossip.algorithm.PostLocal": ("periodic_averaging.period", "PostLocal"),
}
_OF_ALL = ("options", "EpochOptions")


def check_algorithm(cfg: DictConfig) -> None:
    """Refuse what the chosen strategy's algorithm does not take.

    Args:
        cfg: a configuration; nothing is looked at where it has no strategy of this package.

    Raises:
        ConfigurationError: of the options' own class.
        OmegaConfBaseException: where only Hydra's own process can resolve a value.
    """
    target = OmegaConf.select(cfg, "strategy._target_")
    if target not in _OF_STRATEGY:
        return
    given = OmegaConf.to_container(cfg.strategy, resolve=True)
    assert isinstance(given, dict)
    _made(_OF_ALL, given)
    options = _made(_OF_STRATEGY[target], given)
    devices, nodes = (OmegaConf.select(cfg, f"trainer.{name}") for name in ("devices", "num_nodes"))
    each_rank_gossips = given.get("island", 1) == 1 and "data_parallel_size" not in given
    if options is not None and hasattr(options, "check") and each_rank_gossips and is_integer(devices, 1):
        options.check(devices * (nodes if is_integer(nodes, 1) else 1))


def _made(place: tuple[str, str], given: Mapping[Any, Any]) -> Any:
    """An object of a class of options, of those arguments that it has; None if one of them is an object of the user's own."""
    cls = getattr(import_module(f"{_ALGORITHM}.{place[0]}"), place[1])
    names = {field.name for field in fields(cls)}
    arguments = {name: _value(value) for name, value in given.items() if name in names}
    return None if _USERS_OWN in arguments.values() else cls(**arguments)


_USERS_OWN = object()


def _value(value: Any) -> Any:
    if not isinstance(value, Mapping) or "_target_" not in value:
        return value
    if value["_target_"] not in _OBJECTS:
        return _USERS_OWN
    module, name = _OBJECTS[value["_target_"]]
    cls = getattr(import_module(f"{_ALGORITHM}.{module}"), name)
    arguments = {key: _value(each) for key, each in value.items() if not str(key).startswith("_")}
    return cls(**arguments) if set(arguments) <= {field.name for field in fields(cls)} else _USERS_OWN


def check_names(cfg: DictConfig) -> None:
    """Refuse names of strategies that there are not.

    Args:
        cfg: a configuration; nothing is looked at where it has no list of strategies.

    Raises:
        ConfigurationError: naming the known ones.
    """
    names = OmegaConf.select(cfg, "strategies")
    if not isinstance(names, Sequence) or isinstance(names, str):
        return
    known = sorted(path.stem for path in Path(import_module("lightning_gossip.conf").__path__[0], "strategy").glob("*.yaml"))
    for name in names:
        if name not in known:
            raise ConfigurationError(f"strategies names {name!r}; the known ones are {', '.join(known)}.")
