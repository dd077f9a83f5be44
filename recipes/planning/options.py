"""What the options of a plan may be, as far as it can be told without PyTorch: looked at before anything is imported."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, check_positive, is_finite, is_integer
from lightning_gossip.errors import ConfigurationError

_MOST = 256  # workers: a minute of simulation, and AD-PSGD's second moments in memory
_EXAMPLES = {"strategies": "ddp,adpsgd,apsgd", "workers": "4,8,16"}


def check_options(cfg: DictConfig) -> None:
    """Refuse by name what cannot be.

    Args:
        cfg: composed from conf/planning.yaml.

    Raises:
        ConfigurationError: naming the key.
    """
    if cfg.measured is not None and not isinstance(cfg.measured, str):
        raise ConfigurationError(f"measured={cfg.measured!r} is not a folder. Write for example measured=outputs/DATE/TIME.")
    for key, values in (("strategies", cfg.strategies), ("workers", cfg.workers)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not len(values):
            raise ConfigurationError(
                f"{key}={values!r} is not a list of at least one. Write for example {key}=[{_EXAMPLES[key]}]."
            )
    for number in cfg.workers:
        if not is_integer(number, 1, _MOST):
            raise ConfigurationError(f"workers holds {number!r}, which is no integer in [1, {_MOST}]. Write workers=[4,8,16].")
    if cfg.most_workers is not None:
        check_integer("most_workers", cfg.most_workers, example=16, otherwise=", or null for as many as now")
    if not is_finite(cfg.target) or not 0.0 < cfg.target < 1.0:
        raise ConfigurationError(f"target={cfg.target!r} is not a share of the loss between 0 and 1. Write for example 0.01.")
    if not is_finite(cfg.margin) or cfg.margin < 1.0:
        raise ConfigurationError(f"margin={cfg.margin!r} is not a number of at least 1. Write for example 2.")
    _check_noise(cfg.noise)


def _check_noise(cfg: DictConfig) -> None:
    if (cfg.variance is None) != (cfg.loss is None):
        raise ConfigurationError(
            "noise.variance and noise.loss go together: a variance is much or little beside the loss where it was measured."
            " Write for example noise.variance=3.0 noise.loss=1.0."
        )
    if cfg.variance is not None:
        check_not_negative("noise.variance", cfg.variance)
        check_positive("noise.loss", cfg.loss)
    if cfg.curvature is not None:
        check_positive("noise.curvature", cfg.curvature)
    if not is_finite(cfg.with_loss) or not 0.0 <= cfg.with_loss <= 1.0:
        raise ConfigurationError(f"noise.with_loss={cfg.with_loss!r} is not a share between 0 and 1. Write for example 1.")
    check_integer("noise.batches", cfg.batches, at_least=2, example=128)
