"""What the optimizers of all recipes have in common: biases and normalisation layers do not decay."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: what decays, and what does not: biases and all of normalisation layers.

    A parameter that several modules share is there once, as the first of them has it.

    Args:
        network: whose parameters.
        weight_decay: of the first group; the second's is 0.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            (exempt if name == "bias" or isinstance(module, _NORMS) else decayed).append(parameter)
    groups = ((decayed, weight_decay), (exempt, 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]
