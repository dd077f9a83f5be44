"""What stands in for Python: its text is written to a file of its own behind ``#!python -IS`` and the address of the server.

It imports next to nothing, so that it begins in ten milliseconds. It ends when the forked process ends, in the same way; if it
is killed, the server kills that one.
"""

import os
import sys
from _signal import (
    SIG_BLOCK,
    SIG_DFL,
    SIG_IGN,
    SIG_SETMASK,
    SIGCHLD,
    SIGINT,
    SIGKILL,
    SIGPIPE,
    SIGSTOP,
    getsignal,
    pthread_sigmask,
    raise_signal,
    signal,
    valid_signals,
)
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket

ADDRESS = ""  # in the file
PASSED_ON = valid_signals() - {SIGKILL, SIGSTOP, SIGCHLD, SIGPIPE}


def main() -> None:
    before = pthread_sigmask(SIG_BLOCK, PASSED_ON)  # the script may be quicker than this, and ask for a signal
    server = socket(AF_UNIX, SOCK_STREAM)
    server.connect(ADDRESS)
    mine = server.fileno()
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if number != mine and is_open(number)]
    request = repr(
        {
            "arguments": sys.argv[1:],
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "files": files,
            "session": os.getsid(0),
            "ignores_interrupts": getsignal(SIGINT) == SIG_IGN,
        }
    ).encode()
    for number in files:
        os.set_inheritable(number, True)
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    server.sendmsg([len(request).to_bytes(4, "big")], [(SOL_SOCKET, SCM_RIGHTS, rights)])
    server.sendall(request)
    pid = int.from_bytes(receive(server, 4), "big")
    for number in (0, 1, 2):  # so that whoever reads them sees them end with the forked process
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, number)
        os.close(devnull)
    for number in files:
        if number > 2:
            os.close(number)

    def pass_on(number: int, _: object) -> None:
        try:  # noqa: SIM105 - contextlib takes long to import
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in PASSED_ON:
        signal(number, pass_on)
    pthread_sigmask(SIG_SETMASK, before)
    status = int.from_bytes(receive(server, 4), "big", signed=True)
    if status < 0:
        if -status != SIGKILL:
            signal(-status, SIG_DFL)
        raise_signal(-status)
    os._exit(status)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def receive(server: socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = server.recv(count - len(data))
        if not more:
            os._exit(70)  # the server has ended
        data += more
    return data


if __name__ == "__main__":
    main()
