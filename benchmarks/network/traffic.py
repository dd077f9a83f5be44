"""Other machines' traffic: TCP connections that are always full, in both directions.

    python -m benchmarks.network.traffic PORT FLOWS [ADDRESS]

Without an address it waits for the connections, with one it makes them. Ends when it is killed.
"""

from __future__ import annotations

import socket
import sys
import threading

_BLOCK = bytes(1 << 16)


def main(port: int, flows: int, address: str | None) -> None:
    if address is None:
        listener = socket.create_server(("", port), backlog=flows)
        print("listening")
        connections = [listener.accept()[0] for _ in range(flows)]
    else:
        connections = [socket.create_connection((address, port)) for _ in range(flows)]
    for connection in connections:
        threading.Thread(target=_receive, args=(connection,), daemon=True).start()
    senders = [threading.Thread(target=_send, args=(connection,)) for connection in connections]
    for sender in senders:
        sender.start()
    print("flowing")
    for sender in senders:
        sender.join()


def _send(connection: socket.socket) -> None:
    while True:
        connection.sendall(_BLOCK)


def _receive(connection: socket.socket) -> None:
    block = bytearray(len(_BLOCK))
    while connection.recv_into(block):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
