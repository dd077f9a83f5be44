"""``echo.py serve``, and ``echo.py ADDRESS BYTES TIMEOUT_S``: prints how long it took until all were there."""

from __future__ import annotations

import socket
import sys
import time

PORT = 5000


def serve() -> None:
    with socket.create_server(("0.0.0.0", PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"!")


def send(address: str, size: int, timeout_s: float) -> None:
    begin_s = time.monotonic()
    with socket.create_connection((address, PORT), timeout_s) as connection:
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    print(time.monotonic() - begin_s)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else send(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
