"""What elastic averaging is told, in a real run and in a simulated one (:mod:`lightning_gossip.algorithm.eamsgd`)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gossip.algorithm.checks import check_integer, is_finite
from lightning_gossip.algorithm.options import Options
from lightning_gossip.errors import ConfigurationError

_BETA = 0.9  # of the paper, as recalled


@dataclass(frozen=True, kw_only=True)
class EAMSGDOptions(Options):
    """What elastic averaging is told, in a real run and in a simulated one.

    Args:
        period: τ, own steps from one exchange with the centre to the next, at least 1.
        alpha: α, the moving rate, in [0, 0.5]; None for 0.9/n.
        momentum: δ, Nesterov's, of the workers' SGD, in [0, 1): 0 is EASGD; None to leave the optimizer as it is.
        server_rank: on which rank the centre is.
    """

    period: int = 8
    alpha: float | None = None
    momentum: float | None = None
    server_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("period", self.period, example=8)
        check_integer("server_rank", self.server_rank, at_least=0, example=0)
        if self.alpha is not None and not (is_finite(self.alpha) and 0.0 <= self.alpha <= 0.5):
            raise ConfigurationError(
                f"alpha={self.alpha!r} is not in [0, 0.5]; above it a worker and the centre step past each other. Leave it out"
                " for 0.9/n."
            )
        if self.momentum is not None and not (is_finite(self.momentum) and 0.0 <= self.momentum < 1.0):
            raise ConfigurationError(
                f"momentum={self.momentum!r} is not in [0, 1). Write for example momentum=0.9, momentum=0.0 for EASGD, or leave"
                " it out for the optimizer's own."
            )

    def check(self, workers: int) -> None:
        """Refuse what does not fit the number of workers.

        Raises:
            ConfigurationError: naming the option.
        """
        if self.server_rank >= workers:
            raise ConfigurationError(f"server_rank={self.server_rank} of {workers} workers: ranks are 0 to {workers - 1}.")

    def moving_rate(self, workers: int) -> float:
        """α of n workers.

        >>> EAMSGDOptions().moving_rate(4), EAMSGDOptions(alpha=0.1).moving_rate(4)
        (0.225, 0.1)
        """
        return min(0.5, _BETA / workers) if self.alpha is None else self.alpha
