"""Text to train on, as one string: a file, a folder of books, or the modules of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from lightning_gossip import ConfigurationError

HOW = (
    "a text file in UTF-8 or a folder of *.txt files (`apt-get install bible-kjv` and `bible gen1:1-rev22:21 > kjv.txt` make"
    " one of 4.3 million characters), or null for the source text of Python's standard library"
)


def read(path: str | Path | None) -> str:
    """The whole text.

    Args:
        path: a file; a folder, whose ``*.txt`` are put together in the order of their names; None for
            :func:`standard_library`.

    Raises:
        ConfigurationError: if there is no such text, or it is not UTF-8; with how to get one.
    """
    if path is None:
        return standard_library()
    place = Path(str(path)).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.glob("*.txt") if file.is_file())
        if not files:
            raise _refused(path, "is a folder without a *.txt file in it")
    elif place.exists():
        files = [place]
    else:
        raise _refused(path, "does not exist")
    text = "".join(_read(file) for file in files)
    if not text.strip():
        raise _refused(path, "has no text in it")
    return text


def standard_library() -> str:
    """The modules at the top of Python's standard library in the order of their names, some 5 million characters.

    Packages, and with them tests and what is installed, are left out. Another version of Python has another text.

    Raises:
        ConfigurationError: where Python was installed without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda file: file.name)
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    if not text.strip():
        raise ConfigurationError(
            f"{folder} has no source text of Python's standard library. Write recipe.data.path=FILE with a text of yours."
        )
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(file, f"is not UTF-8 at byte {error.start}: iconv converts it") from error
    except OSError as error:
        raise _refused(file, f"cannot be read: {(error.strerror or str(error)).lower()}") from error


def _refused(path: str | Path, problem: str) -> ConfigurationError:
    return ConfigurationError(f"recipe.data.path={path} {problem}; expected is {HOW}.")
