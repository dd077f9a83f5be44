"""What the keys of a configuration may be: looked at first of all, so that a slip of the keyboard starts nothing.

Options of the package's own strategies, schedules and clusters are checked by their classes; here is what goes to modules,
data modules and the Trainer, which would complain late, on every worker, or not at all.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_gossip.algorithm.checks import is_finite, is_integer
from lightning_gossip.errors import ConfigurationError

_LARGEST_SEED = 2**32 - 1  # NumPy's
_FOUND_LATER = ("last", "hpc", "best", "registry")  # names of checkpoints that Lightning itself looks for
_PICKLE = b"\x80"  # how a checkpoint of before PyTorch 1.6 begins


@dataclass(frozen=True)
class Accepted:
    """The values of one key.

    Args:
        test: whether a value is one.
        words: what they are, as the end of "... is not".
        example: one of them.
    """

    test: Callable[[Any], bool]
    words: str
    example: object


def _whole(at_least: int, example: int, at_most: int | None = None) -> Accepted:
    bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    return Accepted(lambda value: is_integer(value, at_least, at_most), f"a whole number {bounds}", example)


def _number(test: Callable[[float], bool], words: str, example: float) -> Accepted:
    return Accepted(lambda value: is_finite(value) and test(value), f"a number {words}", example)


def _numbers(example: str) -> Accepted:
    def test(values: Any) -> bool:
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        return is_list and all(is_finite(value) and value >= 0 for value in values)

    return Accepted(test, "a list of numbers of at least 0", example)


def _or(other: object, accepted: Accepted) -> Accepted:
    written = "null" if other is None else str(other)
    return Accepted(lambda value: value == other or accepted.test(value), f"{written} or {accepted.words}", accepted.example)


def _one_of(*words: str) -> Accepted:
    return Accepted(lambda value: value in words, f"one of {', '.join(words)}", words[0])


_SWITCH = Accepted(lambda value: isinstance(value, bool), "true or false", "true")
_POSITIVE = _number(lambda value: value > 0, "above 0", 0.1)
_SHARE = _number(lambda value: 0 <= value < 1, "of at least 0 and below 1", 0.9)

_SEEDS = {"seed": _whole(0, 1, _LARGEST_SEED), "strategy.seed": _whole(0, 0), "cluster.seed": _whole(0, 0)}
_DATA = {
    "recipe.data.batch_size": _whole(1, 16),
    "recipe.data.num_workers": _whole(0, 2),
    "recipe.data.skew": _or(None, _POSITIVE),
    "recipe.data.skew_seed": _whole(0, 1),
    "recipe.data.prefetch": _whole(1, 2),
    "recipe.data.classes": _whole(2, 1000),
    "recipe.data.image_size": _whole(1, 224),
    "recipe.data.validation_images": _whole(1, 5000),
    "recipe.data.max_characters": _or(None, _whole(1, 1_000_000)),
    "recipe.data.held_out": _number(lambda value: 0 < value < 1, "above 0 and below 1", 0.1),
}
_MODEL = {
    "recipe.model.lr": _POSITIVE,
    "recipe.model.lr_per_256": _POSITIVE,
    "recipe.model.momentum": _SHARE,
    "recipe.model.weight_decay": _number(lambda value: value >= 0, "of at least 0", 1e-4),
    "recipe.model.milestones": _numbers("[0.3,0.6]"),
    "recipe.model.gamma": _number(lambda value: 0 < value <= 1, "above 0 and up to 1", 0.1),
    "recipe.model.warmup_epochs": _number(lambda value: value >= 0, "of at least 0", 5),
    "recipe.model.label_smoothing": _number(lambda value: 0 <= value < 1, "of at least 0 and below 1", 0.1),
    "recipe.model.channels": _whole(1, 16),
    "recipe.model.hidden": _whole(1, 64),
    "recipe.model.shift": _whole(0, 1),
    "recipe.model.classes": _whole(2, 1000),
    "recipe.model.channels_last": _SWITCH,
    "recipe.model.layers": _whole(1, 5),
    "recipe.model.heads": _whole(1, 4),
    "recipe.model.width": _whole(1, 128),
    "recipe.model.sequence_length": _whole(1, 128),
    "recipe.model.vocabulary": _whole(256, 256),
    "recipe.model.dropout": _SHARE,
    "recipe.model.tie_weights": _SWITCH,
}
_TRAINER = {
    "trainer.max_epochs": _whole(1, 20),
    "trainer.num_nodes": _whole(1, 1),
    "trainer.accumulate_grad_batches": _whole(1, 1),
    "trainer.gradient_clip_val": _or(None, _number(lambda value: value >= 0, "of at least 0", 1.0)),
    "trainer.log_every_n_steps": _whole(0, 10),
    "trainer.num_sanity_val_steps": _whole(-1, 0),
    "trainer.enable_model_summary": _SWITCH,
    "trainer.benchmark": _or(None, _SWITCH),
}
_STRATEGY = {  # beside what the algorithms' own classes of options say
    "strategy.checkpoint": _one_of("mean", "replicas"),
    "strategy.start_method": _one_of("popen", "spawn", "fork", "forkserver"),
    "strategy.on_peer_failure": _one_of("continue", "raise"),
    "strategy.joiner_optimizer": _one_of("copy", "fresh"),
    "strategy.on_nonfinite": _one_of("raise", "adopt"),
    "strategy.refuse_nonfinite": _SWITCH,
    "strategy.exchange_timeout_s": _POSITIVE,
    "strategy.peer_timeout_s": _POSITIVE,
    "strategy.min_workers": _or(None, _whole(1, 2)),
    "strategy.max_workers": _or(None, _whole(1, 8)),
    "strategy.island": _or("node", _whole(1, 8)),
    "strategy.bits": _whole(2, 4, 8),
    "strategy.bucket_size": _whole(1, 512),
    "strategy.norm": _one_of("max", "l2"),
}
_PROCESSES = {"trainer.devices": _or("auto", _whole(1, 4))}  # of CPUs; which GPUs there are is Lightning's business


def check(cfg: DictConfig) -> None:
    """Refuse what cannot be trained with, by its key.

    Args:
        cfg: composed from conf/.

    Raises:
        ConfigurationError: naming the key, its value and what is accepted.
    """
    check_given(cfg)
    check_numbers(cfg)
    check_folder("run_dir", cfg.run_dir)
    if cfg.logger.get("save_dir") is not None:
        check_folder("logger.save_dir", cfg.logger.save_dir)
    if cfg.ckpt_path is not None:
        check_checkpoint("ckpt_path", cfg.ckpt_path)


def check_given(cfg: DictConfig) -> None:
    """Refuse a configuration that lacks what only the user can know.

    Raises:
        ConfigurationError: naming the first key that has no value.
    """
    for key in sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigurationError(f"{key} is not given, and nobody else can know it. Write {key}=...")


def check_numbers(cfg: DictConfig) -> None:
    """Refuse values that are out of range, or of another kind. Only of this package's recipes: others know their own keys.

    Args:
        cfg: a configuration that may lack any of the keys.

    Raises:
        ConfigurationError: naming the key, its value and what is accepted.
    """
    ranges: dict[str, Accepted] = dict(_SEEDS)
    for node, keys in (("recipe.data", _DATA), ("recipe.model", _MODEL)):
        if str(OmegaConf.select(cfg, f"{node}._target_")).startswith("recipes."):
            ranges.update(keys)
    if str(OmegaConf.select(cfg, "strategy._target_")).startswith("lightning_gossip."):
        ranges.update(_STRATEGY)
    ranges["recipe.epochs"] = _whole(1, 20)
    ranges["recipe.gradient_clip_val"] = _TRAINER["trainer.gradient_clip_val"]
    ranges.update(_TRAINER)
    if OmegaConf.select(cfg, "trainer.accelerator") == "cpu":
        ranges.update(_PROCESSES)
    _check_all(cfg, ranges)


def _check_all(cfg: DictConfig, ranges: Mapping[str, Accepted]) -> None:
    absent = object()
    for key, accepted in ranges.items():
        value = OmegaConf.select(cfg, key, default=absent)
        if value is not absent and not accepted.test(value):
            shown = "null" if value is None else repr(OmegaConf.to_object(value) if OmegaConf.is_config(value) else value)
            raise ConfigurationError(f"{key}={shown} is not {accepted.words}. Write for example {key}={accepted.example}.")


def check_folder(key: str, folder: str | Path) -> None:
    """Make a folder, and refuse one that cannot be written to.

    Args:
        key: of the configuration.
        folder: its value.

    Raises:
        ConfigurationError: naming both, with the system's reason.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(
            f"{key}={folder} cannot be written to: {reason}. Write {key}=FOLDER with one that can."
        ) from error


def check_checkpoint(key: str, path: object) -> None:
    """Refuse a checkpoint that is not there, or is none. Its contents are not read.

    Args:
        key: of the configuration.
        path: its value: a file, a folder (a sharded checkpoint), an address, or a name that Lightning looks for.

    Raises:
        ConfigurationError: naming both.
    """
    if not isinstance(path, str):
        raise ConfigurationError(f"{key}={path!r} is not a path. Write for example {key}=outputs/DATE/TIME/model.ckpt.")
    if path in _FOUND_LATER:
        return
    from lightning.fabric.utilities.cloud_io import get_filesystem  # takes seconds; the rest of this module is quick

    if not get_filesystem(path).exists(path):
        raise ConfigurationError(f"{key}={path}: there is no such file. A run leaves model.ckpt in its folder.")
    if "://" in path or Path(path).is_dir():
        return
    try:
        with open(path, "rb") as file:
            is_one = zipfile.is_zipfile(file) or (file.seek(0) or file.read(1)) == _PICKLE
    except OSError as error:
        raise ConfigurationError(f"{key}={path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    if not is_one:
        raise ConfigurationError(f"{key}={path} is not a checkpoint: PyTorch has not written this file, or not to its end.")
