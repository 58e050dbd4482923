"""A module that only one other imports has a reason to stand alone."""

import ast
import tomllib
from collections import defaultdict
from functools import cache

import pytest

from tests.house.modules import ROOT, name_of, source_files, statements_of

REASONS = tomllib.loads((ROOT / "tests/house/one_importer.toml").read_text(encoding="utf-8"))


@cache
def importers():
    """Return who imports each module of the packages by a statement, wherever it stands."""
    paths = {name_of(path): path for path in source_files()}
    found = defaultdict(set)
    for name, path in paths.items():
        for node in statements_of(path):
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                targets = {each if each in paths else node.module for each in inner}
            else:
                continue
            for target in targets & (paths.keys() - {name}):
                found[target].add(name)
    return {name: found[name] for name, path in paths.items() if path.name != "__init__.py"}


@pytest.mark.parametrize("package", sorted(REASONS))
def test_a_module_with_one_importer_has_a_reason(package):
    alone = {
        name.removeprefix(f"{package}.")
        for name, by in importers().items()
        if len(by) == 1 and name.startswith(f"{package}.")
    }

    assert alone - REASONS[package].keys() == set(), "join it to its importer, or say why not"
    assert REASONS[package].keys() - alone == set(), "it has other importers by now, or is gone"


def test_few_modules_have_one_importer():
    assert sum(map(len, REASONS.values())) <= 60
