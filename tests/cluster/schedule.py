"""What happens to whom and when, drawn from a seed alone: the same seed is the same schedule, whatever the job does."""

from __future__ import annotations

import random
from typing import NamedTuple

# how likely each is, and for how long, in seconds; peer_timeout_s of the job is 6
KINDS: dict[str, tuple[float, tuple[float, float]]] = {
    "kill": (3.0, (0.5, 10.0)),  # SIGKILL; the same command again at the end
    "power": (1.0, (0.5, 10.0)),  # the link first, so that nobody hears of the end
    "stop": (3.0, (0.5, 12.0)),  # SIGSTOP, SIGCONT
    "cut": (1.5, (0.5, 12.0)),  # its interface is down
    "part": (1.5, (0.5, 12.0)),  # its packets are lost
    "slow": (2.0, (2.0, 12.0)),  # its link has a hundredth of its rate
}
_GAP_S = 4.0  # mean time between two, without what they wait for
_FIRST_S = 2.0
_AGREED_S = 10.0  # after one: until the others have agreed without the worker, or with it again; longer than peer_timeout_s
_LAST_S = 20.0  # from the end of the last one to the job's: whoever comes back imports, and waits for an epoch to begin


class Trouble(NamedTuple):
    """One worker's, for a while; then it is healed, and started again if it has ended.

    Args:
        at_s: since the first epoch's beginning.
        kind: of KINDS.
        worker: its rank.
        seconds: until the worker is all right.
    """

    at_s: float
    kind: str
    worker: int
    seconds: float

    @property
    def until_s(self) -> float:
        return round(self.at_s + self.seconds, 3)

    @property
    def over_s(self) -> float:
        """When all have agreed again."""
        return round(self.until_s + (0.0 if self.kind == "slow" else _AGREED_S), 3)

    def __str__(self) -> str:
        return f"{self.kind} worker {self.worker} for {self.seconds:.1f} s"


def schedule(seed: int, *, workers: int, length_s: float) -> list[Trouble]:
    """Troubles of a run; more than half of the workers are all right at any time (of two, one), and all are at the end.

    That is what a job is promised to survive (docs/survival.md). Who was in trouble counts as so for a while: the others
    have to agree who is in before the next one.

    One worker, drawn too, is only slowed down: who comes back needs somebody to be taken in by, however long that takes.

    Args:
        seed: of all draws.
        workers: how many there are.
        length_s: of the job; its last seconds are without any.
    """
    draw = random.Random(seed)
    made: list[Trouble] = []
    at_s = _FIRST_S
    stays = draw.randrange(workers)
    while True:
        at_s = round(at_s + draw.expovariate(1 / _GAP_S), 3)
        kind = draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        seconds = round(draw.uniform(*KINDS[kind][1]), 3)
        while len(now := [trouble for trouble in made if trouble.over_s > at_s]) >= max(1, (workers - 1) // 2):
            at_s = min(trouble.over_s for trouble in now)
        spared = {trouble.worker for trouble in now} | (set() if kind == "slow" else {stays})
        worker = draw.choice([rank for rank in range(workers) if rank not in spared])
        if at_s + seconds + _LAST_S > length_s:
            return made
        made.append(Trouble(at_s, kind, worker, seconds))
