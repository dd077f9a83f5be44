"""What a command says before it imports PyTorch and Lightning: told by the modules that are there, since times are noisy."""

from __future__ import annotations

import ast
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from omegaconf import OmegaConf

from lightning_gossip.algorithm.compression.qsgd import Norm
from lightning_gossip.runtime.adpsgd.nonfinite_guard import OnNonFinite
from lightning_gossip.strategies.lightning.fault_tolerance import JoinerOptimizer, OnPeerFailure
from lightning_gossip.strategies.options import CheckpointKind, StartMethod
from recipes import algorithm_options, light, ranges
from recipes.light import _calls
from tests.scripts import ROOT

_CALLS = {  # arguments → exit status and what is said
    "recipes.train --help": (0, "== Configuration groups =="),
    "recipes.simulate --help": (0, "== Configuration groups =="),
    "recipes.plan --help": (0, "== Configuration groups =="),
    "recipes.train strategi=ddp": (1, "Key 'strategi' is not in struct"),
    "recipes.simulate strategy=nosuch": (1, "Could not find 'strategy/nosuch'"),
    "recipes.plan trainer.device=4": (1, "Key 'device' is not in struct"),
    "recipes.train +foo=1": (2, "nothing reads 'foo'"),
    "recipes.simulate +clutser_file=x": (2, "Did you mean 'cluster_file'?"),
    "recipes.train recipe.model.lr=-1": (2, "recipe.model.lr=-1 is not a number above 0"),
    "recipes.plan recipe.data.batch_size=0": (2, "recipe.data.batch_size=0 is not a whole number"),
    "recipes.plan target=7": (2, "target=7 is not a share of the loss"),
    "recipes.plan workers=8": (2, "workers=8 is not a list"),
    "recipes.train outer=nesterov outer.lr=-1": (2, "outer.lr=-1 is not a number above 0"),
    "recipes.simulate strategies=[ddp,foo]": (2, "strategies names 'foo'; the known ones are adaptive_averaging"),
    "recipes.train strategy=noloco outer.lr=-1": (2, "outer.lr=-1 is not a number above 0"),
    "recipes.train strategy=adpsgd strategy.wire=int9": (2, "wire='int9' is not one of"),
    "recipes.train strategy.topology=rign": (2, "ring"),
    "recipes.train strategy=periodic_averaging schedule.period=0": (2, "got period=0"),
    "recipes.train strategy=adaptive_averaging schedule.low=2": (2, "low"),
    "recipes.train strategy=apsgd strategy.on_stale=keep": (2, "on_stale='keep' is not one of"),
    "recipes.train strategy=dpsgd topology=base_2 strategy.weights=uniform": (2, "comes with its own matrices"),
    "recipes.train topology=hypercube trainer.devices=3": (2, "3"),
    "recipes.train strategy=eamsgd strategy.alpha=0.7": (2, "alpha=0.7 is not in [0, 0.5]"),
    "recipes.train strategy=qsgd strategy.bits=9": (2, "strategy.bits=9 is not a whole number from 2 to 8"),
    "recipes.train strategy.at_rendezvous=adapt": (2, "at_rendezvous='adapt' is not one of"),
    "recipes.train strategy.checkpoint=own": (2, "strategy.checkpoint='own' is not one of mean, replicas"),
    "recipes.train strategy.peer_timeout_s=0": (2, "strategy.peer_timeout_s=0 is not a number above 0"),
    "recipes.train --multirun strategy=ddp,nosuch": (1, "Could not find 'strategy/nosuch'"),
    "recipes.train --multirun seed=1,2 recipe.model.lr=0.1,0": (2, "recipe.model.lr=0 is not a number above 0"),
}
_LATER = {"networkx", "scipy", "simpy", "pandas", "matplotlib", "hydra", "rich", "wandb"}
_SCRIPT = """
import contextlib, io, json, runpy, sys
for call in json.loads(sys.argv.pop()):
    said = io.StringIO()
    name, *sys.argv[1:] = call.split()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            code = error.code
            if isinstance(code, str):
                print(code)
                code = 1
    heavy = [name for name in ("torch", "lightning", "lightning_gossip", "pandas", "scipy") if name in sys.modules]
    print(json.dumps([code or 0, said.getvalue(), heavy]))
"""


@pytest.mark.processes
def test_help_and_what_is_wrong_with_options_is_told_without_pytorch_and_without_a_traceback() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(list(_CALLS))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == len(_CALLS)
    for (call, (code, words)), (ended_with, said, heavy) in zip(_CALLS.items(), found, strict=True):
        assert ended_with == code, (call, said)
        assert words in said, (call, said)
        assert "Traceback" not in said
        assert heavy == [], call
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s < 3.0 * len(_CALLS)


@pytest.mark.processes
@pytest.mark.slow  # four seconds of a core; the sources tell nearly as much
def test_importing_the_package_imports_nothing_beside_lightning_that_it_may_not_need() -> None:
    script = (
        "import sys, lightning.pytorch; there = set(sys.modules); import lightning_gossip; print(*set(sys.modules) - there)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=170, check=True)
    new = ended.stdout.split()
    assert "lightning_gossip.strategies.adpsgd" in new
    assert {name.split(".")[0] for name in new}.isdisjoint(_LATER)
    layers = {name.split(".")[1] for name in new if name.startswith("lightning_gossip.")}
    assert layers.isdisjoint({"simulation", "analysis", "doctor", "callbacks"})


def at_once(module: str) -> set[str]:
    """What a module of the package imports when it is imported itself, as names of modules or of things in them."""
    found, todo = set(), list(ast.parse(source_of(module)).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def source_of(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.exists() else ""  # else it is the name of a thing


def test_in_the_sources_nothing_that_is_for_later_is_imported_at_once() -> None:
    seen, todo = set(), ["lightning_gossip"]
    while todo:
        module = todo.pop()
        seen.add(module)
        parents = [module.rpartition(".")[0]] if "." in module else []
        todo += [name for name in {*at_once(module), *parents} - seen if name.split(".")[0] == "lightning_gossip"]
        late = {name for name in at_once(module) if name.split(".")[0] in _LATER}
        assert late == set(), module
    assert len(seen) > 100
    assert at_once("lightning_gossip.algorithm.topology.networkx_later") == {
        "__future__",
        "__future__.annotations",
        "typing",
    } | {
        "typing.TYPE_CHECKING",
        "typing.Any",
    }


def test_of_a_sweep_each_value_is_looked_at_once() -> None:
    assert list(_calls(["a=1", "b=x"], sweeps=False)) == [["a=1", "b=x"]]
    calls = list(_calls(["a=1,2,3", "b=x,y", "c=5"], sweeps=True))
    assert calls == [[f"a={a}", f"b={b}", "c=5"] for a, b in ((1, "x"), (2, "x"), (3, "x"), (1, "y"))]
    assert list(_calls(["lr=interval(0.1,1)", "a=[1,2]"], sweeps=True)) == [["a=[1,2]"]]


def test_the_words_that_are_told_without_the_strategies_are_theirs() -> None:
    words = {
        "checkpoint": CheckpointKind,
        "start_method": StartMethod,
        "on_peer_failure": OnPeerFailure,
        "joiner_optimizer": JoinerOptimizer,
        "on_nonfinite": OnNonFinite,
        "norm": Norm,
    }
    for name, accepted in words.items():
        told = ranges._STRATEGY[f"strategy.{name}"]
        assert told.words == f"one of {', '.join(get_args(accepted))}"
        assert all(told.test(word) for word in get_args(accepted))


def test_every_strategy_of_the_configuration_is_looked_at() -> None:
    targets = {
        str(OmegaConf.load(path).get("_target_") or OmegaConf.load(path).get("strategy", {}).get("_target_"))
        for path in (ROOT / "lightning_gossip" / "conf" / "strategy").glob("*.yaml")
    }
    own = {target for target in targets if target.startswith("lightning_gossip.")}
    assert own == set(algorithm_options._OF_STRATEGY)


def test_what_a_plan_has_chosen_is_not_looked_at_as_if_it_were_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``--config-name plan cluster.seed=1``: a key that the default has not was refused, by a failed import."""
    monkeypatch.setattr(
        sys, "argv", ["recipes.train", "--config-dir", str(tmp_path), "--config-name", "plan", "cluster.seed=1"]
    )
    asked: list[str] = []
    monkeypatch.setattr(light, "_hydra", asked.append)
    light._look("config")
    assert asked == []
