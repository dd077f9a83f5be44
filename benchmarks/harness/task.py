"""One worker: ``python -m benchmarks.harness.task MODULE FUNCTION FOLDER``.

The function gets its parameters, and if it has one of this name the ``folder``; what it returns is the result.
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.harness.workers import rank


def main(module: str, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    function, place = getattr(import_module(module), name), Path(folder)
    parameters = json.loads((place / "parameters.json").read_text())
    if "folder" in inspect.signature(function).parameters:
        parameters["folder"] = place
    result = function(**parameters)
    (place / f"result-{rank()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
