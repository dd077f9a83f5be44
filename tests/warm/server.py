"""Forks scripts from a process that has imported what they import: ``python -m tests.warm.server LISTENER PYTHON LOG``.

One thread, one loop: a request from :mod:`tests.warm.command` is a fork, a connection that closes a kill, a child's end a
status. It ends with its standard input, and adopts whatever a script leaves behind, so that whoever looks below it finds that.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import multiprocessing
import os
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any, NoReturn

from tests.warm.client import HELPER
from tests.warm.pages import collapse

PRELOADED = (
    "lightning.pytorch.cli",
    "lightning.pytorch.demos.boring_classes",
    "torch.distributed.run",
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks",
    "torch.utils.serialization",
    "torchmetrics.classification",
    "encodings.idna",
    "networkx",
    "pydantic",  # wandb itself makes a folder as it is imported, which the first that ends would remove
    "google.protobuf.descriptor_pb2",
    "tensorboard",
    "torch.utils.tensorboard",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "lightning_gossip.callbacks",
    "recipes.train",
    "recipes.vision.data",
    "recipes.vision.classifier",
    "recipes.simulate",
    "recipes.report",
    "recipes.compare",
    "recipes.plan",
    "matplotlib.pyplot",
    "pytest",
    "xdist.remote",
    "psutil",
    "hypothesis",
    "tests.strategies.launch",
    "tests.strategies.models",
)
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_HIGH = 300  # file numbers that no script uses


class Forked(Exception):
    """Leaves the loop of the server, in the child, which is to run this."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request


class Server:
    """See the module.

    Args:
        listener: where requests come from.
        log: file to which a line is added for each fork: session of the one who asked, number of the child.
    """

    def __init__(self, listener: socket.socket, log: Path) -> None:
        self._listener = listener
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, socket.socket] = {}
        self._pids: dict[socket.socket, int] = {}
        self._woken, waking = os.pipe()
        os.set_blocking(waking, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the standard input ends."""
        for source in (self._listener, self._woken, 0):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    for pid in self._children:
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif key.fileobj == self._listener:
                    self._fork()
                else:
                    self._forget(key.fileobj)  # type: ignore[arg-type]

    def _fork(self) -> None:
        connection, _ = self._listener.accept()
        head, files, _, _ = socket.recv_fds(connection, 4, 250)
        request = ast.literal_eval(_receive(connection, int.from_bytes(head, "big")).decode())
        pid = os.fork()
        if pid == 0:
            request["received"] = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
            connection.close()
            self._close()
            raise Forked(request)
        for file in files:
            os.close(file)
        self._children[pid] = connection
        self._pids[connection] = pid
        with self._log.open("a") as log:
            log.write(f"{request['session']} {pid}\n")
        try:
            connection.sendall(pid.to_bytes(4, "big"))
        except OSError:
            self._forget(connection)
        else:
            self._selector.register(connection, selectors.EVENT_READ)

    def _close(self) -> None:
        """In the child, before the numbers of these files are another's: their objects would close those."""
        self._selector.close()
        self._listener.close()
        for connection in self._pids:
            connection.close()

    def _forget(self, connection: socket.socket) -> None:
        """The command has ended, so its script does."""
        pid = self._pids.get(connection)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)  # there is no other process of this number before it is reaped here
        if connection in self._selector.get_map():
            self._selector.unregister(connection)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            connection = self._children.pop(pid, None)
            if connection is None:
                continue  # adopted
            del self._pids[connection]
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
            connection.close()


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more
        data += more
    return data


def _become(request: dict[str, Any], executable: str) -> None:
    """Be the process that was asked for, up to its first line."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignores_interrupts"] else signal.default_int_handler)
    os.setsid()
    files = dict(zip(request["files"], request["received"], strict=True))
    os.closerange(3, _HIGH)
    for number, received in files.items():
        os.dup2(received, number)
        os.close(received)
    for number in {0, 1, 2} - set(files):
        os.close(number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].set_num_threads(1)
    sys.executable = executable
    multiprocessing.set_executable(executable)
    if os.environ.get("PYTHONFAULTHANDLER"):
        importlib.import_module("faulthandler").enable()


def _run(arguments: list[str], base: list[str]) -> None:
    """As the interpreter runs what is on its command line."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        option = arguments.pop(0)
        unbuffered |= option == "-u"
        if option in ("-W", "-X"):
            arguments.pop(0)
    if unbuffered:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry] + base
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    kind = arguments[0]
    if kind == "-c":
        sys.argv, sys.path = ["-c", *arguments[2:]], ["", *path]
        code: Any = compile(arguments[1], "<string>", "exec")
        if "multiprocessing.forkserver" in arguments[1] or "multiprocessing.resource_tracker" in arguments[1]:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, HELPER.encode(), 0, 0, 0)
    elif kind == "-m":
        sys.path = [os.getcwd(), *path]
        sys.argv = ["-m", *arguments[2:]]
        _, spec, code = runpy._get_module_details(arguments[1])  # type: ignore[attr-defined]
        main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
        sys.argv[0] = spec.origin
    else:
        sys.argv, sys.path = arguments, [str(Path(kind).resolve().parent), *path]
        main.__file__ = kind
        code = compile(Path(kind).read_bytes(), kind, "exec")
    sys.modules["__main__"] = main
    exec(code, vars(main))


def main(listener: int, executable: str, log: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    atexit.register(_keep_libraries)  # the first to be registered is the last to be called
    base = [entry for entry in sys.path[1:] if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for module in PRELOADED:
        importlib.import_module(module)
    importlib.import_module("tests.warm.remembered").remember()
    threads = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"forks cannot have these threads: {threads}"
    Path(log).with_name("pid").write_text(str(os.getpid()))
    gc.collect()
    gc.freeze()  # else each child's first collection would copy all of it
    collapse()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Server(socket.socket(fileno=listener), Path(log)).serve()
    except Forked as forked:
        request = forked.request
    else:
        _leave()
    _become(request, executable)
    del request["received"]
    _run(request["arguments"], base)


def _keep_libraries() -> None:
    """The interpreter of a script ends as any other; to take torch apart would copy half a gigabyte that others share.

    So what is imported from elsewhere stays, and the tables that C++ would destroy after the interpreter.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libraries = tuple(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(libraries):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


def _leave() -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
