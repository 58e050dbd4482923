"""Texts that every Python installation holds: modules, functions, docstrings, notices, reference.

What is found depends on the installation alone: files are visited in the order of a
digest of their paths, so that a small budget still takes from everywhere.
"""

import ast
import hashlib
import os
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Installation", "Text", "functions_and_docstrings", "texts_of"]

_TEST_FOLDERS = {"test", "tests", "idle_test"}
_OTHER_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_LONG_BYTES = 32 << 10
_SHORTEST_FUNCTION_LINES = 3
_SHORTEST_DOCSTRING = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One document and where it comes from."""

    name: str
    """Path or qualified name."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Where to look."""

    stdlib: Path
    """Folder of the standard library."""
    site_packages: Path
    """Folder of installed packages."""

    def modules(self) -> list[Path]:
        """Return the standard library's modules but for its tests, in digest order."""
        return _by_digest(_walk(self.stdlib, _OTHER_FOLDERS | _TEST_FOLDERS), self.stdlib)

    def long_modules(self) -> list[Path]:
        """Return long modules, in digest order: the library's tests or, without those, packages'.

        Some systems ship the tests apart from the library.
        """
        tests = self.stdlib / "test"
        found = [path for path in _walk(tests, _OTHER_FOLDERS) if _size(path) >= _LONG_BYTES]
        if not found:
            found = [
                path
                for path in _walk(self.site_packages, {"__pycache__"})
                if _size(path) >= _LONG_BYTES
            ]
        found = found or [path for path in self.modules() if _size(path) >= _LONG_BYTES]
        return _by_digest(found, self.stdlib)

    def notices(self) -> list[Path]:
        """Return metadata and licences of packages, and the library's own licence."""
        found = [self.stdlib / "LICENSE.txt"]
        for folder in sorted(self.site_packages.glob("*.dist-info")):
            found += [folder / "METADATA", *sorted(folder.rglob("LICEN[CS]E*"))]
        return _by_digest([path for path in found if path.is_file()], self.site_packages.parent)

    def reference(self) -> list[Text]:
        """Return the chapters of the language reference that ``help()`` shows."""
        path = self.stdlib / "pydoc_data" / "topics.py"
        if not path.is_file():
            return []
        for node in _parsed(_read(path)).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                topics: dict[str, str] = ast.literal_eval(node.value)
                return [Text(name=name, text=text) for name, text in sorted(topics.items())]
        return []


def texts_of(paths: list[Path], budget_bytes: int) -> list[Text]:
    """Read files until they hold ``budget_bytes``; those that are not UTF-8 are passed over."""
    texts: list[Text] = []
    for path in paths:
        if budget_bytes <= 0:
            break
        text = _read(path)
        if text.strip():
            texts.append(Text(name=path.name, text=text))
            budget_bytes -= len(text.encode())
    return texts


def functions_and_docstrings(
    paths: list[Path], *, function_bytes: int, docstring_bytes: int
) -> tuple[list[Text], list[Text]]:
    """Cut modules into functions and docstrings until there are enough bytes of both."""
    functions: list[Text] = []
    docstrings: list[Text] = []
    for path in paths:
        if function_bytes <= 0 and docstring_bytes <= 0:
            break
        source = _read(path)
        tree = _parsed(source)
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if function_bytes > 0 and (cut := _function(node, lines)):
                functions.append(Text(name=f"{path.stem}.{getattr(node, 'name', '')}", text=cut))
                function_bytes -= len(cut.encode())
            if docstring_bytes > 0 and (said := _docstring(node)):
                docstrings.append(Text(name=f"{path.stem}.{getattr(node, 'name', '')}", text=said))
                docstring_bytes -= len(said.encode())
    return functions, docstrings


def _function(node: ast.AST, lines: list[str]) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
        return ""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if node.end_lineno - first + 1 < _SHORTEST_FUNCTION_LINES:
        return ""
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))


def _docstring(node: ast.AST) -> str:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    said = ast.get_docstring(node) or ""
    # An escape for a lone surrogate makes a string that no format can hold.
    writable = said.encode(errors="ignore").decode() == said
    return said if writable and len(said) >= _SHORTEST_DOCSTRING else ""


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules hold escapes that newer Pythons warn of
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            return ast.Module(body=[], type_ignores=[])


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    # Tokenizers and viewers stumble over NUL; a few test modules hold it.
    return "" if "\0" in text else text


def _walk(folder: Path, left_out: set[str]) -> Iterator[Path]:
    """Yield the Python files below ``folder``, in order."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in left_out)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(here, name)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _by_digest(paths: list[Path] | Iterator[Path], base: Path) -> list[Path]:
    def key(path: Path) -> bytes:
        return hashlib.blake2b(os.path.relpath(path, base).encode(), digest_size=8).digest()

    return sorted(paths, key=key)
