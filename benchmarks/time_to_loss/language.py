"""A language model learns; what takes time is GPT-2 with 124,439,808 parameters in float32, on an A10 that makes 40 % of its
125 TFLOP/s with 123 k tokens a step: 6 · 124.4e6 · 123e3 / 50e12 = 1.8 s (reckoned, not measured)."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import torch

from benchmarks.time_to_loss.task import Task
from lightning_gossip.simulation.problems.modules import ModuleObjective
from lightning_gossip.simulation.problems.torch_optimizers import TorchOptimizer
from recipes.simulated.modules import PlannedRun, trained
from recipes.text import corpus
from recipes.text.data import TextData
from recipes.text.language_model import LanguageModel

BATCH_SIZE, LENGTH = 4, 64  # sequences of a worker's step, bytes of each
CHARACTERS = 2_200_000  # of the text: no run has a sequence twice
HELD_OUT = 128  # sequences of the validation text
SMALL = {"layers": 2, "heads": 4, "width": 64, "sequence_length": LENGTH}
LARGE = {"layers": 12, "heads": 12, "width": 768, "sequence_length": 1024, "vocabulary": 50_257}
CLIP_NORM = 1.0


@cache
def text() -> TextData:
    """Of Python's standard library."""
    data = TextData(max_characters=CHARACTERS, sequence_length=LENGTH, batch_size=BATCH_SIZE)
    data.setup("fit")
    return data


def build(lr: float, planned: PlannedRun) -> tuple[ModuleObjective, TorchOptimizer]:
    """The recipe's module with its optimizer, its warm-up and cosine, its clipping."""
    return trained(lambda: LanguageModel(**SMALL, lr=lr), text(), planned, clip_norm=CLIP_NORM, held_out=HELD_OUT)  # type: ignore[arg-type]


def shapes(sizes: dict[str, int]) -> list[torch.Size]:
    """Of the parameters of a model."""
    with torch.device("meta"):
        return [parameter.shape for parameter in LanguageModel(**sizes).parameters()]  # type: ignore[arg-type]


def about() -> dict[str, Any]:
    """The model, the text, the clipping."""
    return {
        "small_model": {**SMALL, "parameters": sum(shape.numel() for shape in shapes(SMALL))},
        "text_sha256": hashlib.sha256(corpus.standard_library()[:CHARACTERS].encode()).hexdigest()[:16],
        "held_out_sequences": HELD_OUT,
        "clip_norm": CLIP_NORM,
    }


CHAR_GPT = Task(
    name="char_gpt",
    file="time_to_loss",
    title="a language model's loss",
    model_bytes=4 * 124_439_808,
    compute_s=1.8,
    rates_mbit=(1000, 200, 50),
    lrs=(2e-3, 4e-3, 8e-3, 1.6e-2),
    steps=320,
    batch_size=BATCH_SIZE,
    build=build,
    about=about,
)
