"""What is trained, and what it stands for.

The model that learns is small, so that a run is some ten seconds of one core. What takes virtual time, a step's computing and
the bytes of a model on its way, is a large one's: GPT-2 with 124,439,808 parameters in float32, on an A10 that makes 40 % of
its 125 TFLOP/s with 123 k tokens a step, 6 · 124.4e6 · 123e3 / 50e12 = 1.8 s (reckoned, not measured).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lightning_gossip.simulation import Cluster, Links, Uniform
from lightning_gossip.simulation.problems.modules import ModuleObjective
from lightning_gossip.simulation.problems.torch_optimizers import TorchOptimizer
from recipes.simulated.modules import PlannedRun, trained
from recipes.text import corpus
from recipes.text.data import TextData
from recipes.text.language_model import LanguageModel

MODEL_BYTES = 4 * 124_439_808
COMPUTE_S, SPREAD = 1.8, 0.1
LATENCY_S = 1e-3
SLOW_WORKER, SLOW_LINK = 4.0, 10.0
RATES_MBIT = (1000, 200, 50)

STEPS = 320  # of each worker, if all are equally fast
BATCH_SIZE, LENGTH = 4, 64  # sequences of a worker's step, bytes of each
CHARACTERS = 2_200_000  # of the text: no run has a sequence twice
HELD_OUT = 128  # sequences of the validation text
SMALL = {"layers": 2, "heads": 4, "width": 64, "sequence_length": LENGTH}
LARGE = {"layers": 12, "heads": 12, "width": 768, "sequence_length": 1024, "vocabulary": 50_257}
CLIP_NORM = 1.0

SCENARIOS = {
    "equal": "equal workers and links",
    "slow_worker": f"one worker {SLOW_WORKER:g} times slower",
    "slow_link": "one host's link at a tenth",
}


@dataclass(frozen=True)
class Condition:
    """Where a run is.

    Args:
        hosts: of one worker each.
        rate_mbit: of their links.
        scenario: a name in `SCENARIOS`; what is slow is the last host's.
    """

    hosts: int
    rate_mbit: float
    scenario: str

    @property
    def cluster(self) -> Cluster:
        """The workers."""
        slow = {self.hosts - 1: SLOW_WORKER} if self.scenario == "slow_worker" else {}
        return Cluster(self.hosts, Uniform(COMPUTE_S, SPREAD), slowdown=slow)

    @property
    def links(self) -> Links:
        """Between them."""
        slow: dict[int | tuple[int, int], float] = {self.hosts - 1: SLOW_LINK} if self.scenario == "slow_link" else {}
        return Links(latency_s=LATENCY_S, bandwidth=self.rate_mbit * 1e6 / 8, slow=slow)


@cache
def text() -> TextData:
    """Of Python's standard library."""
    data = TextData(max_characters=CHARACTERS, sequence_length=LENGTH, batch_size=BATCH_SIZE)
    data.setup("fit")
    return data


def problem(*, lr: float, steps: int, hosts: int) -> tuple[ModuleObjective, TorchOptimizer]:
    """The recipe's module with its optimizer, its warm-up and cosine over so many steps, its clipping."""
    planned = PlannedRun(steps, 1, hosts)
    return trained(lambda: LanguageModel(**SMALL, lr=lr), text(), planned, clip_norm=CLIP_NORM, held_out=HELD_OUT)  # type: ignore[arg-type]


def shapes(sizes: dict[str, int]) -> list[torch.Size]:
    """Of the parameters of a model."""
    with torch.device("meta"):
        return [parameter.shape for parameter in LanguageModel(**sizes).parameters()]  # type: ignore[arg-type]


def settings() -> dict[str, Any]:
    """What must be equal for runs to be compared."""
    return {
        "small_model": {**SMALL, "parameters": sum(shape.numel() for shape in shapes(SMALL))},
        "text_sha256": hashlib.sha256(corpus.standard_library()[:CHARACTERS].encode()).hexdigest()[:16],
        "model_bytes": MODEL_BYTES,
        "compute_s": COMPUTE_S,
        "spread": SPREAD,
        "latency_s": LATENCY_S,
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "held_out_sequences": HELD_OUT,
        "clip_norm": CLIP_NORM,
    }


def shapes_in_order() -> list[torch.Size]:
    """Of the small model's parameters, as a flat model has them."""
    return problem(lr=1e-3, steps=1, hosts=1)[0].shapes
