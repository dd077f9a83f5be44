"""Wrong arguments of the public classes: one sentence that says what to write instead."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_gossip import (
    ADPSGDStrategy,
    ConfigurationError,
    EventTrigger,
    FabricStrategy,
    Outer,
    PiecewisePeriod,
    simulation,
)
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.callbacks import CollectiveCounter, CurvatureProbe, EpochProgressBar, GossipMonitor
from lightning_gossip.simulation import Cluster, Links, make_law, make_strategy

# made by the package, not by users
RESULTS = {
    *("FitReport", "WorkerReport", "Arrivals", "Curve", "Fastest", "LossCurve", "Prediction", "RunTime"),
    *("EpochRecord", "Point", "Result", "Span", "StalenessHistogram", "TraceEvent", "VersionCounter", "WorkerAccount"),
}


def made_by_users() -> dict[str, type]:
    found: dict[str, type] = {}
    for module in ("", ".algorithm", ".analysis", ".callbacks", ".simulation"):
        public = importlib.import_module(f"lightning_gossip{module}")
        for name in public.__all__:
            value = getattr(public, name)
            if not inspect.isclass(value) or name in RESULTS or issubclass(value, BaseException):
                continue
            if not inspect.isabstract(value) and not getattr(value, "_is_protocol", False):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


CLASSES = made_by_users()


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_says_what_it_does_not_take(name: str) -> None:
    cls = CLASSES[name]
    with pytest.raises(ConfigurationError, match=rf"^{cls.__name__} (has no argument 'no_such_name'|needs 'strategy')"):
        cls(no_such_name=1)
    with pytest.raises(ConfigurationError, match=rf"^{cls.__name__} takes "):
        cls(*range(60))


def test_all_kinds_of_classes_were_found() -> None:
    assert len(CLASSES) > 50


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: ADPSGDStrategy("ring"),
            "ADPSGDStrategy takes its arguments by name. Write for example ADPSGDStrategy(topology='ring').",
        ),
        (
            lambda: simulation.ADPSGD("ring"),
            "ADPSGD takes its arguments by name. Write for example ADPSGD(topology='ring').",
        ),
        (
            lambda: ADPSGDStrategy("ring", 0.25, Outer()),
            "Write for example ADPSGDStrategy(topology='ring', exchanges_per_step=0.25, outer=...).",
        ),
        (
            lambda: ADPSGDStrategy("ring", local_steps=4),
            "ADPSGDStrategy takes its arguments by name. Write for example ADPSGDStrategy(topology='ring', local_steps=4).",
        ),
        (lambda: ADPSGDStrategy(2, seed=1), "Write for example ADPSGDStrategy(local_steps=2, seed=1)."),
        (
            lambda: FabricStrategy(ADPSGDStrategy(), 4),
            "FabricStrategy takes 'epochs' by name. Write FabricStrategy(..., epochs=4).",
        ),
        (lambda: FabricStrategy(), "FabricStrategy needs 'strategy'. Write FabricStrategy(strategy=...)."),
        (lambda: FabricStrategy(seed=1), "FabricStrategy needs 'strategy'. Write FabricStrategy(strategy=..., seed=1)."),
        (lambda: GossipMonitor(every=3), "GossipMonitor has no argument 'every' (value 3). It has: stability."),
        (
            lambda: CurvatureProbe(every=3),
            "CurvatureProbe has no argument 'every'. Did you mean 'every_n_epochs'? Write CurvatureProbe(every_n_epochs=3).",
        ),
        (lambda: EpochProgressBar(refresh=3), "Did you mean 'refresh_rate'? Write EpochProgressBar(refresh_rate=3)."),
        (lambda: CollectiveCounter(3), "CollectiveCounter takes no arguments. Write CollectiveCounter()."),
        (lambda: CollectiveCounter(of=3), "CollectiveCounter has no argument 'of'. It takes none: write CollectiveCounter()."),
        (lambda: EventTrigger(3), "Write for example EventTrigger(threshold=3)."),
        (lambda: Outer(0.7, 0.9, True, None, 5), "Outer takes at most 4 arguments and got 5. It has: lr, momentum, nesterov"),
        (lambda: Outer(0.7, lr=0.7), "Outer got 'lr' twice, by place and by name. Write it once."),
        (lambda: Cluster(compute=1.0), "Cluster needs 'workers'. Write Cluster(workers=..., compute=1.0)."),
        (lambda: Links(latency=0.1), "Links has no argument 'latency'. Did you mean 'latency_s'? Write Links(latency_s=0.1)."),
        (lambda: make_strategy("adpsgd", topolgy="ring"), "Did you mean 'topology'? Write ADPSGD(topology='ring')."),
        (lambda: make_law("erlang", shap=2), "Did you mean 'shape'? Write Erlang(shape=2)."),
    ],
)
def test_the_call_that_was_meant_is_there(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert says in str(caught.value)


def test_a_type_error_of_the_constructor_itself_stays_one() -> None:
    @clear_arguments
    class Broken:
        def __init__(self, value: int = 0) -> None:
            len(value)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        Broken(3)


def test_a_subclass_is_called_by_its_own_name() -> None:
    class Mine(ADPSGDStrategy):
        pass

    with pytest.raises(ConfigurationError, match=r"^Mine takes its arguments by name.*Mine\(topology='ring'\)"):
        Mine("ring")  # type: ignore[call-arg]


def test_a_constructor_is_for_tools_what_it_was() -> None:
    def init(self: Any, period: int = 8, *, wire: str = "float32") -> None: ...

    plain = type("Plain", (), {"__init__": init})
    clear = clear_arguments(type("Clear", (), {"__init__": init}))
    assert inspect.signature(clear) == inspect.signature(plain)
    assert inspect.getsource(clear.__init__) == inspect.getsource(init)  # type: ignore[misc]
    assert inspect.get_annotations(clear.__init__, eval_str=True) == inspect.get_annotations(init, eval_str=True)  # type: ignore[misc]


@pytest.mark.parametrize("value", [Outer(0.5), PiecewisePeriod((4, 16), (0.5,)), EventTrigger(threshold=0.1)])
def test_an_object_is_copied_and_sent(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


def test_jsonargparse_reads_the_arguments_and_those_that_are_handed_on() -> None:
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(ADPSGDStrategy, "strategy")
    assert {"strategy.topology", "strategy.work_sharing", "strategy.timeout", "strategy.interface"} <= set(added)
    parser.add_class_arguments(EpochProgressBar, "bar")
    made = parser.instantiate_classes(parser.parse_args(["--strategy.topology=star", "--bar.refresh_rate=7"]))
    assert (made.strategy.topology, made.bar.refresh_rate) == ("star", 7)


def test_a_dataclass_of_options_is_extended_as_usual() -> None:
    @clear_arguments
    @dataclass(frozen=True)
    class Wide(Outer):
        width: int = 1

    assert Wide(0.5, width=3).width == 3
    with pytest.raises(ConfigurationError, match=r"Wide has no argument 'widht'. Did you mean 'width'\? Write Wide\(width=3\)"):
        Wide(widht=3)  # type: ignore[call-arg]
