from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from recipes.train import CONF
from tests.recipes.test_config import composed, options


@pytest.mark.parametrize("recipe", options(CONF / "recipe"))
def test_norms_and_biases_have_no_weight_decay_and_everything_else_has(recipe: str) -> None:
    cfg = composed(f"recipe={recipe}")
    with torch.device("meta"):
        model = instantiate(cfg.recipe.model)
    model._trainer = SimpleNamespace(
        world_size=4, accumulate_grad_batches=1, max_epochs=2, max_steps=-1, estimated_stepping_batches=100
    )
    groups = model.configure_optimizers()["optimizer"].param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm)]
    exempt = {id(parameter) for module in norms for parameter in module.parameters()}
    exempt |= {id(parameter) for name, parameter in model.named_parameters() if name.endswith("bias")}
    assert decay.keys() == {id(parameter) for parameter in model.parameters()}
    assert all(decay[parameter] == 0 for parameter in exempt)
    assert all(decay[parameter] == cfg.recipe.model.weight_decay > 0 for parameter in decay.keys() - exempt)
