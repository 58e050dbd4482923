"""A module that only one other module imports has a stated reason to be separate."""

import ast
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.house.modules import ROOT, name_of, source_files, statements_of

REASONS = tomllib.loads((ROOT / "tests/house/one_importer.toml").read_text(encoding="utf-8"))


def imported_by(path, modules):
    """Yield the modules, among ``modules``, that a file imports by a statement, at any level."""
    for node in statements_of(path):
        if isinstance(node, ast.Import):
            yield from modules & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from modules & {each if each in modules else node.module for each in inner}


@cache
def importers():
    """Return the importers of each module of the packages."""
    paths = {name_of(path): path for path in source_files()}
    found = defaultdict(set)
    for name, path in paths.items():
        for target in imported_by(path, paths.keys() - {name}):
            found[target].add(name)
    return {name: found[name] for name, path in paths.items() if path.name != "__init__.py"}


def alone_in(package):
    """Return the modules with one importer, except those that users also import, by the name of the package."""
    alone = {name for name, by in importers().items() if len(by) == 1}
    for door in ("__init__.py", "__init__.pyi"):
        path = Path(ROOT, package, door)
        alone -= set(imported_by(path, importers().keys())) if path.is_file() else set()
    return {name.removeprefix(f"{package}.") for name in alone if name.startswith(f"{package}.")}


@pytest.mark.parametrize("package", sorted(REASONS))
def test_a_module_with_one_importer_has_a_reason(package):
    alone = alone_in(package)

    assert alone - REASONS[package].keys() == set(), "join it to its importer, or say why not"
    assert REASONS[package].keys() - alone == set(), "it has other importers by now, or is gone"


def test_few_modules_have_one_importer():
    assert sum(map(len, REASONS.values())) <= 60
