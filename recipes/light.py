"""What a command looks at before it imports PyTorch and Lightning, which takes four seconds of a core.

``--help``, an option that there is not, and a value that cannot be are told by then. A command begins with

    if __name__ == "__main__":
        from recipes.light import look

        look("config")
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

CONF = Path(__file__).resolve().parent.parent / "conf"
_PACKAGES = ("lightning_gossip", "lightning_gossip.algorithm")
_PURE = ("lightning_gossip.errors", "lightning_gossip.algorithm.checks", "lightning_gossip.conf")
_AT_ONCE = ("help", "hydra_help", "version", "show_completion", "install_completion")


def look(config: str) -> None:
    """End the command if all that it has to do is to say something: help, or what is wrong with its options.

    Args:
        config: name of the command's configuration.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":  # rank 0 says it
        return
    with _pure_modules():
        _look(config)


def _look(config: str) -> None:
    from recipes import overrides, ranges
    from recipes.algorithm_options import check_algorithm, check_names
    from recipes.commands import one_sentence
    from recipes.planning.options import check_options

    call = get_args_parser().parse_args()
    if any(getattr(call, name, False) for name in _AT_ONCE):
        sys.exit(_hydra(config))
    if call.config_name or call.config_dir or call.config_path:
        return  # another configuration than the command's own, which has other keys
    try:
        parsed = list(_calls(call.overrides, sweeps=call.multirun))
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = [(compose(config, given), given) for given in parsed]
    except (HydraException, OmegaConfBaseException) as error:
        if not call.multirun:
            _hydra(config)  # says it in its own words, and ends
        elif os.environ.get("HYDRA_FULL_ERROR") != "1":
            sys.exit(f"{error}\n\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.")
        return
    with one_sentence():
        for cfg, given in composed:
            overrides.check(cfg, given, CONF / f"{config}.yaml")
            for check in (
                ranges.check_numbers,
                check_names,
                check_algorithm,
                *([check_options] if config == "planning" else []),
            ):
                _as_far_as_it_resolves(check, cfg)


def _hydra(config: str) -> int:
    """Let Hydra do all that it does around a command, which itself does nothing."""
    hydra.main(version_base="1.3", config_path=str(CONF), config_name=config)(_nothing)()
    return 0


def _nothing(cfg: DictConfig) -> None: ...


def _as_far_as_it_resolves(check: Callable[[DictConfig], None], cfg: DictConfig) -> None:
    try:
        check(cfg)
    except OmegaConfBaseException:
        return  # what only Hydra's own process can resolve is looked at there


def _calls(given: Sequence[str], *, sweeps: bool) -> Iterator[list[str]]:
    """The overrides of single runs; of a sweep each value once, beside the first ones of the others."""
    if not sweeps:
        yield list(given)
        return
    values = []
    for override in OverridesParser.create().parse_overrides(list(given)):
        swept = override.is_sweep_override() and override.is_discrete_sweep()
        if override.is_sweep_override() and not swept:
            continue  # a range of numbers, for a sweeper to draw from
        key = override.get_key_element()
        values.append([f"{key}={value}" for value in override.sweep_string_iterator()] if swept else [str(override.input_line)])
    first = [each[0] for each in values]
    yield first
    for place, each in enumerate(values):
        for value in itertools.islice(each, 1, None):
            yield [*first[:place], value, *first[place + 1 :]]


@contextmanager
def _pure_modules() -> Iterator[None]:
    """Inside, modules of lightning_gossip are imported without the packages around them, which import Lightning.

    They stay, and the packages find them when they are imported themselves.
    """
    root = None if _PACKAGES[0] in sys.modules else importlib.util.find_spec(_PACKAGES[0])
    if root is None or root.submodule_search_locations is None:
        yield
        return
    folder = Path(next(iter(root.submodule_search_locations)))
    try:
        for name in _PACKAGES:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        for name in _PURE:
            importlib.import_module(name)
        yield
    finally:
        for name in _PACKAGES:
            del sys.modules[name]
