"""What the planner would choose for the user's model on this cluster: ``recipes.plan`` in a process of its own.

The planner is above this layer, and in the repository only; the command is one that a reader can type again.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_gossip.doctor.cluster_file import FILE
from lightning_gossip.doctor.report import Report

_PLAN_S = 300.0  # seconds of CPU are 15 for two workers
_SGD = ("SGD",)
_RECIPES = {True: "digits_mlp", False: "char_gpt"}  # with SGD, and with an optimizer that adapts; all that they say is given


def command(report: Report, folder: Path) -> list[str] | str:
    """The planner's command; or why there is none, in a sentence.

    Args:
        report: of the visit.
        folder: where cluster.json is.
    """
    if not report.training:
        return "there is no training step to plan for"
    training, landscape = report.training[min(report.training)], report.landscape
    if landscape is None:
        return "the curvature of the loss was not measured"
    if training.lr is None or training.batch_size is None or training.samples is None:
        return "the learning rate, the size of a batch or the number of samples cannot be told from the model and its data"
    if not (folder / FILE).exists():
        return f"there is no {FILE}"
    workers = len(report.workers)
    options = {
        "cluster_file": folder / FILE,
        "strategy": "ddp",
        "recipe": _RECIPES[training.optimizer in _SGD],
        "recipe.model.lr": training.lr,
        "recipe.data.batch_size": training.batch_size,
        "samples": training.samples,
        "model_bytes": training.parameters_bytes,
        "compute.backward_share": round(training.backward_share, 3),
        "curvature.largest": f"{landscape.eigenvalues[0]:.4g}",  # the planner fills the spectrum up below it
        "workers": f"[{workers}]",
        "run_dir": folder / "plan",
    }
    if training.momentum is not None and training.optimizer in _SGD:
        options["recipe.model.momentum"] = training.momentum
    if landscape.noise_variance is not None and landscape.loss is not None:
        options |= {"noise.variance": f"{landscape.noise_variance:.4g}", "noise.loss": f"{landscape.loss:.4g}"}
    if landscape.noise_curvature is not None and landscape.noise_curvature > 0.0:
        options["noise.curvature"] = f"{landscape.noise_curvature:.4g}"
    if landscape.along_loss is not None:
        options["curvature.along_loss"] = f"{landscape.along_loss:.4g}"
    return ["-m", "recipes.plan", *(f"{key}={value}" for key, value in options.items())]


def choice(arguments: Sequence[str], folder: Path) -> list[str]:
    """Let the planner choose.

    Args:
        arguments: of Python, from :func:`command`.
        folder: where it leaves its own.

    Returns:
        Sentences for the reader.
    """
    typed = shlex.join(["python", *arguments])
    if importlib.util.find_spec("recipes") is None:
        return ["The planner is in the repository of this package and not in the wheel. There, run:", typed]
    try:
        ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=_PLAN_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"The planner takes longer than {_PLAN_S:.0f} s here. Run it by itself:", typed]
    if ended.returncode != 0:
        return [f"The planner refused: {' '.join(ended.stderr.split())[-500:]}", typed]
    plan = json.loads((folder / "plan" / "plan.json").read_text(encoding="utf-8"))
    said = str(plan["recommendation"]).replace("recipe.model.", "")
    return [f"The planner would choose: {said} {plan['idealised']}", typed]
