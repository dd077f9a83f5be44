"""A Python that has imported torch, Lightning and the recipes already, so that a script begins in a tenth of a second.

Importing them costs a process five seconds of a core, and most tests of processes start several. So one process imports them
once (:mod:`tests.warm.server`) and forks whatever is started; it has one thread. It has done once what libraries do on first
use (:mod:`tests.warm.remembered`), and keeps its memory in large pages, which are quick to share (:mod:`tests.warm.pages`).

    subprocess.run([warm.python(), "-m", "recipes.train", ...])      # as with sys.executable

:func:`python` is the path of a small command (:mod:`tests.warm.command`) that has the server fork the script, hands it its
arguments, environment, folder and open files, passes signals on, and ends as it ends. In the script ``sys.executable`` is that
command, so what launchers, torchrun and multiprocessing start is forked too. Apart from that the script is a fresh process: it
has a session of its own, and leaves through the end of the interpreter, but for libraries, which are not taken apart (``make
exits`` has whole ends). The workers of pytest-xdist are forked as well (tests/conftest.py), with the real ``sys.executable``.

What is not shown so is that an import works: each launcher is started once with ``sys.executable`` as well.
"""

from tests.warm.client import close, is_helper, python, server, sessions_of, share

__all__ = ["close", "is_helper", "python", "server", "sessions_of", "share"]
