"""What can be trained. A new task is one module, and one name here."""

from __future__ import annotations

from benchmarks.time_to_loss.images import FASHION_MNIST
from benchmarks.time_to_loss.language import CHAR_GPT

TASKS = {task.name: task for task in (CHAR_GPT, FASHION_MNIST)}
