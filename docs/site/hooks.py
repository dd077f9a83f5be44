"""What is added to the pages of docs/ when the site is built: the benchmarks' page, all decisions, every error message."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_gossip"
_BESIDE_DOCS = ("benchmarks/README.md", "benchmarks/results/**/*.png")
_OUT_OF_DOCS = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)+((?:benchmarks|docs|examples|lightning_gossip|recipes|tests)/[^)#]*)(#[^)]*)?\)"
)
_SOURCE = re.compile(r"\[([^\]]*)\]\([\w/]+\.py\)")
_ROLE = re.compile(r":\w+:<code>~?(?:[\w.]*\.)?(\w+)</code>")  # of Sphinx, in docstrings
_PLACE = "<!-- every message -->"


class Message(NamedTuple):
    """What an error says: its class, the file that raises it, and the words; a value is shown by its name in braces."""

    error: str
    file: str
    words: str


def on_config(config: Any) -> Any:
    """All decisions, in their order, where the navigation says ``decisions/``."""
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/decisions").glob("*.md"))
    _fill(config["nav"], pages)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Take in what lies beside docs/."""
    from mkdocs.structure.files import File

    for pattern in _BESIDE_DOCS:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make links that lead out of docs/ lead into the site; of a source file only the name is left."""
    to_root = "../" * page.file.src_uri.count("/")

    def link(found: re.Match[str]) -> str:
        label, target, anchor = found.groups()
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri} leads to {target}, which does not exist.")
        name = target.removeprefix("docs/")
        known = files.get_file_from_path(name) is not None
        return f"[{label}]({to_root}{name}{anchor or ''})" if known else label

    shown = _SOURCE.sub(r"\1", _OUT_OF_DOCS.sub(link, markdown))
    return shown.replace(_PLACE, _table(messages())) if _PLACE in shown else shown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A name that a docstring refers to is shown as a name."""
    return _ROLE.sub(r"<code>\1</code>", html)


def messages() -> list[Message]:
    """Every error of the package that has words of its own, by class and file."""
    return sorted({message for path in sorted(PACKAGE.rglob("*.py")) for message in _messages_of(path)})


def _messages_of(path: Path) -> Iterator[Message]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            error = ast.unparse(node.exc.func).split(".")[-1]
            words = " ".join(_words(node.exc.args[0]).split())
            if " " in words and error.endswith("Error"):
                yield Message(error, path.relative_to(PACKAGE).as_posix(), words)


def _words(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else _value(part) for part in parts)  # type: ignore[misc]
        case ast.BinOp(left=left, right=right):
            return _words(left) + _words(right)
        case _:
            return ""


def _value(part: ast.expr) -> str:
    """A value in a message, by the name of what it is made from."""
    assert isinstance(part, ast.FormattedValue)
    return f"{{{_name(part.value).strip('_')}}}"


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(args=[*_, last]):
            return _name(last)
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Subscript(value=inner) | ast.BinOp(left=inner):
            return _name(inner)
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return _name(first.iter)
        case _:
            return "…"


def _table(found: list[Message]) -> str:
    rows = ["| error | says | in |", "|---|---|---|"]
    for message in found:
        words = message.words.replace("|", "\\|").replace("<", "&lt;")
        rows.append(f"| {message.error} | {words} | `{message.file}` |")
    return "\n".join(rows)


def _fill(nav: list[Any], pages: list[str]) -> None:
    for entry in nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            if value == "decisions/":
                entry[title] = pages
            elif isinstance(value, list):
                _fill(value, pages)
