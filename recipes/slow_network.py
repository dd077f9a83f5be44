"""Run a command on a slow network: ``python -m recipes.slow_network 100mbit python -m recipes.train strategy=adpsgd``.

All workers are on this machine and talk over the loopback interface of a network namespace of their own, which a token bucket
(tc tbf) limits to the given rate: one link that all of them share, as hosts do behind one slow switch. The rest of the machine
keeps its network; the namespace ends with the command. Needs Linux with util-linux and iproute2, and root only where the kernel
lets nobody else make namespaces. There is no other network inside, so a logger must work offline.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from lightning_gossip import ConfigurationError
from recipes.commands import one_sentence

_BURST = "256kb"  # above the largest segment of loopback (64 kB)
_RATE = re.compile(r"[1-9]\d*(kbit|mbit|gbit)")


def limited(rate: str, command: Sequence[str]) -> list[str]:
    """The command line that runs another one on a slow network.

    Args:
        rate: as tc writes it, for example ``100mbit``.
        command: the other one.

    Raises:
        ConfigurationError: for a rate that is none, an empty command, and where this machine cannot do it.
    """
    if not _RATE.fullmatch(rate):
        raise ConfigurationError(f"rate={rate!r} is not a rate. Write for example 100mbit, 1gbit or 500kbit.")
    if not command:
        raise ConfigurationError("There is no command to run. Write for example: 100mbit python -m recipes.train")
    if missing := [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]:
        raise ConfigurationError(f"{', '.join(missing)} not found: a slow network needs Linux with util-linux and iproute2.")
    namespace = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    probe = subprocess.run([*namespace, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        raise ConfigurationError(f"This machine lets nobody but root make a network namespace ({probe.stderr.strip()}).")
    limit = f"ip link set lo up && tc qdisc add dev lo {token_bucket(rate, _BURST)}"
    return [*namespace, "sh", "-c", f'{limit} && exec "$@"', "sh", *command]


def token_bucket(rate: str, burst: str) -> str:
    """What tc is told to limit an interface; what waits longer than 50 ms is dropped, and sent again."""
    return f"root tbf rate {rate} burst {burst} latency 50ms"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; it becomes the one that it runs, signals and exit status included."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rate", help="of the link, for example 100mbit or 1gbit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    options = parser.parse_args(arguments)
    with one_sentence():
        line = limited(options.rate, options.command)
    os.execvp(line[0], line)


if __name__ == "__main__":
    main()
