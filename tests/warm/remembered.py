"""What each process would find out anew, and what is the same in all of them.

A script that trains for a tenth of a second would spend half as long again on it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from io import BytesIO
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import InputDefault, Overrides
from hydra.plugins.config_source import ConfigResult
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from torchmetrics import Metric

from recipes.train import CONF
from tests.strategies.models import Net, loader, trainer
from tests.warm.client import ROOT


@functools.cache
def remember() -> None:
    """In a process that others are forked from; nothing where it is forked from one that has done so."""
    _entry_points()
    _configurations()
    _first_picture()
    if not _has_devices():  # else autograd has a thread for each
        with patch.object(torch._C, "_cuda_getDeviceCount", lambda: 0, create=True):  # once it is asked, torch forbids forks
            _first_fit()


def _has_devices() -> bool:
    """Asked in a process of its own."""
    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda.device_count() > 0)
    return os.waitpid(pid, 0)[1] != 0


def _entry_points() -> None:
    """Of the 160 packages, which Lightning reads with each Trainer and torch with the first process group."""
    read = importlib.metadata.entry_points

    @functools.cache
    def has_packages(folder: str) -> bool:
        return any(importlib.metadata.distributions(path=[folder]))

    @functools.cache
    def known(folders: tuple[str, ...], parameters: frozenset[tuple[str, Any]]) -> Any:
        return read(**dict(parameters))

    @functools.wraps(read)
    def entry_points(**parameters: Any) -> Any:
        return known(tuple(filter(has_packages, sys.path)), frozenset(parameters.items()))

    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("entry_points") is read:
            module.entry_points = entry_points  # type: ignore[attr-defined]
    for group in ("lightning.pytorch.callbacks_factory", "lightning.fabric.callbacks_factory", "torch.distributed.backends"):
        entry_points(group=group)


def _configurations() -> None:
    """The files of Hydra's groups, of which each composition reads some thirty; those that a test has written are read anew.

    And the choices that a list of defaults may refer to, which Hydra makes a configuration of at each, are made where one does.
    """
    read, make_choices = ConfigRepository.load_config, defaults_list._create_interpolation_map
    known: dict[tuple[Any, ...], tuple[ConfigResult, bytes]] = {}
    ours = (f"file://{ROOT}", "pkg://lightning_gossip.", "pkg://hydra.")

    @functools.wraps(read)
    def load_config(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
        key = config_path, *((source.provider, source.path) for source in repository.sources)
        if key in known:
            found, config = known[key]
            return replace(found, config=pickle.loads(config))  # of its own, since it becomes part of the composition
        found = read(repository, config_path)
        if found is not None and found.path.startswith(ours):
            known[key] = found, pickle.dumps(found.config)
        return found

    @functools.wraps(make_choices)
    def choices(overrides: Overrides, defaults: list[InputDefault], self_added: bool) -> DictConfig:
        wanted = any(default.is_interpolation() for default in defaults)
        return make_choices(overrides, defaults, self_added) if wanted else OmegaConf.create()

    defaults_list._create_interpolation_map = choices
    ConfigRepository.load_config = load_config
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for name in ("config", "simulate"):
            compose(name)


def _first_picture() -> None:
    """Fonts and the sizes of letters."""
    figure = Figure()
    figure.subplots().plot([0.0, 1.0], label="a label")
    figure.legend()
    figure.savefig(BytesIO())


def _first_fit() -> None:
    """What libraries set up on first use: kernels of layers, which classes are mappings or metrics, versions of packages.

    It is a fit of plain Lightning on the CPU, on this one thread. Neither random numbers nor warnings are used up by it.
    """
    logging.disable()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Net()
        trainer(strategy="auto", devices=1).fit(model, loader(), loader(32))
    logging.disable(logging.NOTSET)
    for layer in (None, *model.modules()):
        isinstance(layer, Metric)
        isinstance(layer, Iterable)
