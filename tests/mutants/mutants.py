"""Mutants: small defects put into the code, each of which some test must catch."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "modules_naming", "modules_with", "mutants"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One defect: a text of the code, and what stands in its place."""

    package: str
    holds: str
    """What no longer holds with it, as a sentence."""
    before: str
    """Stands once in the package: the module is found by it, wherever that is moved."""
    after: str
    tests: tuple[str, ...]
    """Functions of which one must fail."""


def mutants():
    """Return all of them, by package and in the order of its file."""
    return [
        Mutant(package=file.stem, **{**entry, "tests": tuple(entry["tests"])})
        for file in sorted(HERE.glob("*.toml"))
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]
    ]


def modules_with(mutant, root=ROOT):
    """Return the modules in which its text stands, once for each time."""
    found = []
    for module in sorted((root / mutant.package).rglob("*.py")):
        found += [module] * module.read_text(encoding="utf-8").count(mutant.before)
    return found


def modules_naming(names, root=ROOT):
    """Return the test modules that define one of these functions, and the names that none defines."""
    wanted = {name: re.compile(rf"^\s*def {re.escape(name)}\(", re.MULTILINE) for name in names}
    modules, missing = set(), set(names)
    for module in sorted((root / "tests").rglob("test_*.py")):
        text = module.read_text(encoding="utf-8")
        here = {name for name, defined in wanted.items() if defined.search(text)}
        if here:
            modules.add(module)
            missing -= here
    return sorted(modules), sorted(missing)
