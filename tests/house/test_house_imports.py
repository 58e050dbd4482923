"""Imports point downward, as pyproject.toml requires. Folders outside the packages find the names that they import."""

import ast
import sys
from pathlib import Path

import pytest

from tests.house.modules import PACKAGES, ROOT, name_of, source_files, statements_of
from tests.support.programs import finished


def test_import_contracts_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")

    done = finished([linter, "--no-cache"], limit_s=120, cwd=ROOT)

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def bound_in(path):
    """Return the names that a module binds at its top level, also within conditions."""
    names = set()
    for node in statements_of(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                each.id
                for target in targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            }
    return names


def test_benchmarks_scripts_and_examples_import_names_that_are_there():
    modules = {name_of(path): path for path in source_files()}
    beside = [
        path.relative_to(ROOT)
        for place in ("benchmarks", "scripts", "examples")
        for path in (ROOT / place).rglob("*.py")
    ]

    lost = [
        f"{path}: {node.module}.{alias.name}"
        for path in beside
        for node in statements_of(path)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] in PACKAGES
        # The ``__init__`` of a package provides its names by ``__getattr__``; a separate test checks them.
        and "." in node.module
        for alias in node.names
        if f"{node.module}.{alias.name}" not in modules
        and (node.module not in modules or alias.name not in bound_in(modules[node.module]))
    ]

    assert len(beside) > 50
    assert lost == []
