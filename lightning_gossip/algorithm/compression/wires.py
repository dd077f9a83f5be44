"""How a model may be sent: the words of the option ``wire``."""

from __future__ import annotations

from typing import Literal

Wire = Literal["float32", "bfloat16", "int16", "int8"]
"""Between two workers that exchange; :mod:`lightning_gossip.algorithm.compression.pairwise` says what each does."""

MeanWire = Literal["float32", "bfloat16", "int8"]
"""Of a mean over all; :mod:`lightning_gossip.algorithm.compression.error_feedback_mean` says what each does."""
