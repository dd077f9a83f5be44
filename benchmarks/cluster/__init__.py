"""A small cluster on one machine: hosts with their own network, process numbers and links of limited rate, behind one switch.

    with network(4, rate_mbit=1000) as net:
        worker = Process(net.hosts[2], "my.module", ("--epochs", "3"), log=folder / "2.log", environment={...})
        worker.start()
        net.set_rate(net.hosts[2], 10)        # both directions, while it runs
        net.cut(net.hosts[2])                 # the cable is pulled
        net.part([net.hosts[0]])              # packets between these and the others are lost
        net.heal()                            # everything as it was, but for the rates
        worker.kill()

For the benchmarks and for tests/cluster; not in the wheel. Needs root, util-linux and iproute2 on Linux; :func:`unavailable`
says why a machine cannot have one. Nothing has a name outside, and all ends with the process that made it, even by SIGKILL.
"""

from benchmarks.cluster.namespaces import remains, unavailable
from benchmarks.cluster.network import Host, Network, network
from benchmarks.cluster.processes import Process, preload

__all__ = ["Host", "Network", "Process", "network", "preload", "remains", "unavailable"]
