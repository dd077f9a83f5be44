"""What a command line says and nobody reads: an unknown key is refused, a choice without effect gets a word."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_gossip.arguments import did_you_mean
from lightning_gossip.errors import ConfigurationError

_READ_BY = {"topology": "strategy", "schedule": "strategy", "recipe.epochs": "trainer"}  # by interpolation, and in no other way

log = logging.getLogger(__name__)


def check(cfg: DictConfig, overrides: Sequence[str], config: Path) -> None:
    """Refuse keys that no command has, which Hydra takes with a plus.

    Args:
        cfg: composed.
        overrides: of the command line.
        config: the file of the command's own configuration.

    Raises:
        ConfigurationError: naming the key, and the nearest that there is.
    """
    known = _keys_of(config)
    for override in overrides:
        key = re.split(r"[.=@]", override.lstrip("+~"))[0]
        if key in known or _is_read(cfg, key, [str(name) for name in cfg if name != key]):
            continue
        hint = did_you_mean(key, known)
        raise ConfigurationError(f"{override}: nothing reads {key!r}.{hint} There are: {', '.join(sorted(known))}.")


def warn(cfg: DictConfig, overrides: Sequence[str], strategy: str) -> list[str]:
    """Say, on rank 0, which choices of the command line have no effect beside the others.

    Args:
        cfg: composed.
        overrides: of the command line.
        strategy: the option of that group.

    Returns:
        What was said, one sentence each.
    """
    said = []
    for override in overrides:
        written = override.lstrip("+~").partition("=")[0]
        for key, reader in _READ_BY.items():
            if (written == key or written.startswith(f"{key}.")) and not _is_read(cfg, key, [reader]):
                why = f"strategy={strategy} does not read it" if reader == "strategy" else f"{reader}.max_epochs is given too"
                said.append(f"{override} has no effect: {why}.")
    from lightning.fabric.utilities.rank_zero import rank_zero_only  # takes seconds; the rest of this module is quick

    if getattr(rank_zero_only, "rank", 0) in (0, None):
        for sentence in said:
            log.warning(sentence)
    return said


def _keys_of(config: Path) -> set[str]:
    own = OmegaConf.load(config)
    groups = {str(group).split()[-1] for entry in own.defaults if OmegaConf.is_config(entry) for group in entry}
    return ({str(key) for key in own} | {group for group in groups if "/" not in group}) - {"defaults"}


def _is_read(cfg: DictConfig, key: str, nodes: Sequence[str]) -> bool:
    """Whether one of the nodes has an interpolation of the key, or of something below it."""
    reference = re.compile(r"\$\{" + re.escape(key) + r"[.}\[]")
    for node in nodes:
        raw = OmegaConf.create({"node": cfg._get_node(node)})
        if reference.search(OmegaConf.to_yaml(raw, resolve=False)):
            return True
    return False
