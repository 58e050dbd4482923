"""Every mutant still applies to the code, and the tests that are to catch it are there."""

import ast
from collections import Counter
from functools import cache

import pytest

from tests.mutants.mutants import modules_naming, modules_with, mutants

ALL = mutants()


def test_mutants_are_spread_over_all_packages_and_told_apart():
    counts = Counter(mutant.package for mutant in ALL)

    assert sum(counts.values()) >= 60
    assert {package for package, count in counts.items() if count >= 8} == {
        "fusefs",
        "omniload",
        "snapshot",
        "trainer_integration",
    }
    assert len({(m.package, m.holds) for m in ALL}) == len(ALL)


def statements_of(text):
    """Return the outermost statements of a module, each with its text."""
    lines, found = text.splitlines(), []
    for node in ast.parse(text).body:
        first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
        found.append((node, lines[first - 1 : node.end_lineno]))
    return found


@cache
def code_of(module):
    return statements_of(module.read_text(encoding="utf-8"))


def differ(some, others):
    """Tell whether code differs in more than its form; only what has another text is compared."""
    return len(some) != len(others) or any(
        lines != other_lines and ast.dump(node) != ast.dump(other)
        for (node, lines), (other, other_lines) in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("mutant", ALL, ids=lambda m: f"{m.package}: {m.holds}")
def test_a_mutant_applies_once_and_is_code(mutant):
    found = modules_with(mutant)
    assert len(found) == 1, f"its text stands in {found}; write it anew as the code is now"

    text = found[0].read_text(encoding="utf-8").replace(mutant.before, mutant.after)

    assert differ(statements_of(text), code_of(found[0]))


def test_every_test_that_is_to_catch_one_is_there():
    _, missing = modules_naming({test for mutant in ALL for test in mutant.tests})

    assert missing == []
