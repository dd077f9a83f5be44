"""What a configuration chooses: options of groups, and values; to plan for what a run had, and to train what a plan says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_gossip import ConfigurationError

_GROUPS = ("topology", "schedule", "strategy", "cluster", "recipe", "trainer")
_OTHER = ("seed",)
PLAN = "plan.yaml"
_NODES = ("nodes_", "racks_")  # of conf/cluster


@dataclass(frozen=True)
class Choices:
    """Options and values of the groups of a configuration that training and planning have in common.

    Args:
        groups: group → option.
        values: dotted key → value, where it is another than the option's.
    """

    groups: Mapping[str, str]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """The choices as a command line has them."""
        return [f"{group}={option}" for group, option in self.groups.items()] + [
            f"{key}={_written(value)}" for key, value in self.values.items()
        ]

    def of_strategy(self, name: str) -> Choices:
        """The choices with this strategy, and no values of another."""
        if self.groups["strategy"] == name:
            return self
        values = {key: value for key, value in self.values.items() if not key.startswith("strategy.")}
        return Choices({**self.groups, "strategy": name}, values)

    def on_real_machines(self) -> Choices:
        """The choices without a described cluster of nodes, which is for simulation and planning."""
        if not self.groups["cluster"].startswith(_NODES):
            return self
        values = {key: value for key, value in self.values.items() if not key.startswith("cluster.")}
        return Choices({**self.groups, "cluster": "none"}, values)

    def without(self, overrides: list[str]) -> Choices:
        """The choices without the values of the groups whose option these overrides change."""
        changed = {name for override in overrides for name, _, _ in [override.partition("=")] if name in _GROUPS}
        groups = {group: option for group, option in self.groups.items() if group not in changed}
        values = {key: value for key, value in self.values.items() if key.split(".")[0] not in changed}
        return Choices(groups, values)


def choices_of(cfg: DictConfig, groups: Mapping[str, str], *, config: str) -> Choices:
    """The choices of a composed configuration.

    Args:
        cfg: the configuration.
        groups: the options that it was composed with.
        config: name of the one to compare with: composed with these options and no values.
    """
    own = {group: groups[group] for group in _GROUPS}
    plain = compose(config, [f"{group}={option}" for group, option in own.items()])
    before = _leaves(plain)
    return Choices(own, {key: value for key, value in _leaves(cfg).items() if before.get(key, _NOTHING) != value})


_NOTHING = object()


def choices_of_run(folder: Path) -> Choices | None:
    """The choices of a training run, from what Hydra has left in its folder; None if it has left nothing.

    Raises:
        ConfigurationError: if that cannot be read.
    """
    saved = folder / ".hydra"
    if not (saved / "config.yaml").is_file() or not (saved / "hydra.yaml").is_file():
        return None
    cfg, hydra = OmegaConf.load(saved / "config.yaml"), OmegaConf.load(saved / "hydra.yaml")
    assert isinstance(cfg, DictConfig)
    options = hydra.hydra.runtime.choices
    if any(options.get(group) is None for group in _GROUPS):
        raise ConfigurationError(f"measured={folder} is not the folder of a run of recipes.train: its .hydra says too little.")
    return choices_of(cfg, options, config="config")


def save(choices: Choices, folder: Path, conf: Path, comment: str) -> Path:
    """A primary configuration for recipes.train: its own one, with these choices.

    Args:
        choices: what to train.
        folder: where to write.
        conf: folder of recipes.train's configuration.
        comment: what the file says at its head.
    """
    base: Any = OmegaConf.to_container(OmegaConf.load(conf / "config.yaml"), resolve=False)
    base["defaults"] = [_chosen(entry, choices.groups) for entry in base["defaults"]]
    cfg = OmegaConf.create(base)
    for key, value in choices.values.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    path = folder / PLAN
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    path.write_text(head + OmegaConf.to_yaml(cfg, resolve=False), encoding="utf-8")
    return path


def _chosen(entry: Any, groups: Mapping[str, str]) -> Any:
    if isinstance(entry, dict):
        return {group: groups.get(group, option) for group, option in entry.items()}
    return entry


def _leaves(cfg: DictConfig) -> dict[str, Any]:
    """Dotted key → value below the groups; interpolations stay what they are."""
    found: dict[str, Any] = {}

    def descend(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                descend(value, f"{prefix}.{key}")
        else:
            found[prefix] = node

    for name in (*_GROUPS, *_OTHER):
        if name in cfg:
            node = cfg._get_node(name)
            plain = OmegaConf.to_container(node, resolve=False) if isinstance(node, (DictConfig, ListConfig)) else cfg[name]
            descend(plain, name)
    return found


def _written(value: Any) -> str:
    """A value as Hydra's command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_written(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return repr(value)
