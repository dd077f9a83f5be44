"""The transformer, its loss and its metrics, in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_gossip import ConfigurationError
from lightning_gossip.callbacks.curvature import measure_curvature
from recipes.optimizers import parameter_groups
from recipes.text.data import Sequences, tokens
from recipes.text.language_model import LanguageModel, characters_begun
from recipes.text.samples import TextSamples, printable
from recipes.text.transformer import Transformer
from tests.recipes.test_config import composed

SMALL: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "sequence_length": 12}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def transformer(**options: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**{"vocabulary": 256, **SMALL, **options})


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        # 5 layers of 12 · 128² + 13 · 128, 256 tokens and 128 positions, and the last norm
        ("char_gpt", 5 * (12 * 128**2 + 13 * 128) + (256 + 128) * 128 + 2 * 128),
        ("char_gpt_small", 6 * (12 * 384**2 + 13 * 384) + (256 + 256) * 384 + 2 * 384),
        ("char_gpt_gpt2", 124_439_808),  # Hugging Face's GPT2LMHeadModel counts as many
    ],
)
def test_a_size_has_its_number_of_parameters(recipe: str, expected: int) -> None:
    with torch.device("meta"):
        model = instantiate(composed(f"recipe={recipe}").recipe.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("position", [1, 5, 11])
def test_a_later_character_never_changes_an_earlier_logit(position: int) -> None:
    network = transformer().eval()
    text = torch.randint(256, (3, 12))
    changed = text.clone()
    changed[:, position] = (changed[:, position] + 1) % 256
    with torch.no_grad():
        before, after = network(text), network(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert (before[:, position:] != after[:, position:]).any(dim=(0, 2)).all()


def test_attention_is_the_softmax_of_the_products_below_the_diagonal() -> None:
    attention = transformer().double().blocks[0].attention
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    q, k, v = attention.queries_keys_values(x).view(2, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~torch.ones(7, 7).tril().bool(), -math.inf)
    expected = attention.projection((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)


def test_tied_weights_are_one_parameter_which_the_optimizer_has_once() -> None:
    tied, untied = transformer(), transformer(tie_weights=False)
    assert tied.head.weight is tied.tokens.weight
    count = [sum(parameter.numel() for parameter in network.parameters()) for network in (tied, untied)]
    assert count[1] - count[0] == 256 * 16
    for network in (tied, untied):
        grouped = [id(parameter) for group in parameter_groups(network, 0.1) for parameter in group["params"]]
        assert sorted(grouped) == sorted(map(id, network.parameters()))


def test_at_the_beginning_every_byte_is_as_likely() -> None:
    text = torch.randint(256, (8, 12))
    loss = functional.cross_entropy(transformer()(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.05)


def test_the_last_matrices_of_a_layer_begin_smaller_by_the_root_of_twice_the_layers() -> None:
    network = transformer(layers=8, width=128)
    block = network.blocks[3]
    assert float(block.expansion.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    for last in (block.projection, block.attention.projection):
        assert float(last.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)


def test_a_sequence_longer_than_the_positions_and_a_width_that_heads_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="13 tokens and the model positions for 12"):
        transformer()(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match="width=16 is not a multiple of heads=3"):
        transformer(heads=3)
    with pytest.raises(ConfigurationError, match="vocabulary=255"):
        LanguageModel(**SMALL, vocabulary=255)
    with pytest.raises(ConfigurationError, match="betas"):
        LanguageModel(**SMALL, betas=[0.9])


# -- as a LightningModule ----------------------------------------------------------------------------------------------


def loaders(text: str, batch_size: int = 3) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(Sequences(tokens(text), 12), batch_size)


def test_characters_are_counted_by_the_bytes_that_begin_one() -> None:
    for text in ("plain", "grün ≈ 𝄞"):
        assert int(characters_begun(tokens(text).long())) == len(text)
    assert int(characters_begun(torch.tensor([0x80]))) == 1


def test_bits_per_character_and_perplexity_are_those_of_the_whole_text_however_it_is_batched() -> None:
    torch.manual_seed(0)
    model = LanguageModel(**SMALL)
    text = "Größe ≈ 3 µm, also grün; " * 5
    data = Sequences(tokens(text), 12)
    with torch.no_grad():
        nats = sum(float(functional.cross_entropy(model(x[None])[0], y, reduction="sum")) for x, y in data)
    predicted = torch.cat([y for _, y in data])
    (tested,) = Trainer(**QUIET).test(model, loaders(text), verbose=False)
    expected = nats / math.log(2) / int(characters_begun(predicted))
    assert tested["test_bpc"] == pytest.approx(expected, rel=1e-4)
    assert tested["test_perplexity"] == pytest.approx(math.exp(nats / len(predicted)), rel=1e-4)
    assert tested["test_bpc"] > math.log2(tested["test_perplexity"])  # a character has more than one byte here
    assert 0.0 <= tested["test_acc"] < 0.1


def test_the_learning_rate_warms_up_and_follows_a_cosine_to_zero() -> None:
    factor = LanguageModel(**SMALL, warmup_epochs=0.5).factor(epochs=2)
    expected = {0: 0.1, 0.25: 0.55, 0.5: 1.0, 1.25: 0.5, 2: 0.0}
    assert {epoch: factor(epoch, 0.1) for epoch in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_learns_a_text_by_heart_and_writes_it(precision: Any) -> None:
    torch.manual_seed(0)
    model = LanguageModel(**{**SMALL, "width": 32}, lr=1e-2, warmup_epochs=1.0, weight_decay=0.0)
    text = "abcdefghijkl" * 64
    trainer = Trainer(**QUIET, max_epochs=6, precision=precision, gradient_clip_val=1.0)
    trainer.fit(model, loaders(text, batch_size=4))
    assert float(trainer.callback_metrics["train_loss"]) < 0.5
    assert model.sample("abc", length=9, temperature=0.01) == ["abcdefghijkl"]


def test_samples_are_as_many_and_as_long_as_asked_for_and_leave_the_random_state_and_the_mode_alone() -> None:
    model = LanguageModel(**SMALL, dropout=0.5, vocabulary=300).train()
    state = torch.get_rng_state()
    texts = model.sample("€", length=20, samples=3)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert len(texts) == 3
    assert all(text.startswith("€") for text in texts)
    assert texts == model.sample("€", length=20, samples=3) != model.sample("€", length=20, samples=3, seed=1)


@pytest.mark.parametrize(
    ("options", "message"), [({"prompt": ""}, "prompt='' is empty"), ({"temperature": 0.0}, "temperature")]
)
def test_samples_that_cannot_be_drawn_are_refused_before_the_run(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LanguageModel(**SMALL).sample(**{"prompt": "a", **options}, length=1)
    with pytest.raises(ConfigurationError, match=message):
        TextSamples(tmp_path, **options)


def test_a_terminal_is_not_told_what_to_do() -> None:
    assert printable("a\x1b[2J\tb\n") == "a�[2J\tb\n"


def test_its_curvature_can_be_measured() -> None:
    """Fused attention has no second derivative, the one that stands in for it has."""
    torch.manual_seed(0)
    model = LanguageModel(**{**SMALL, "layers": 1, "width": 8})
    found = measure_curvature(model, loaders("some text to measure on " * 4), batches=1, tolerance=0.1)
    assert found.largest > 0.0
