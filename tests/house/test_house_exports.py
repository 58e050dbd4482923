"""Every module lists its exports in ``__all__``, and defines all of them."""

import ast

from tests.house.modules import base_files, faults, imported, tree_of

MODULES = [path for path in base_files() if path.name != "__init__.py"]

INTERNAL = {
    "fusefs/mounts/daemon.py": {"serve"},
    "fusefs/format/manifest.py": {"object_path"},
    "fusefs/stores/remote/arrow.py": {"ArrowBackend", "store_on"},
    "fusefs/stores/remote/fsspec_store.py": {"FsspecBackend"},
    "omniload/base/cli.py": {"Nouns"},
}
"""Names without an underscore that are not exported; the list may only grow shorter."""


def rank(name):
    """Order constants, then classes, then the rest, as the linter does."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


def unsorted(path):
    offered = list(imported(path).__all__)
    return offered if offered != sorted(set(offered), key=rank) else None


def absent(path):
    module = imported(path)
    return [name for name in module.__all__ if not hasattr(module, name)]


def _is_command(path):
    return path.name == "cli.py" or path.parent.name == "commands"


def hidden_without_a_mark(path):
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    # A decorated function of a command line is reached through its group.
    defined = {
        node.name
        for node in tree_of(path).body
        if isinstance(node, kinds) and not (_is_command(path) and node.decorator_list)
    }

    hidden = defined - set(imported(path).__all__) - INTERNAL.get(str(path), set())
    return sorted(name for name in hidden if not name.startswith("_"))


def test_what_a_module_offers_is_sorted_and_there():
    assert faults(MODULES, unsorted) == {}
    assert faults(MODULES, absent) == {}


def test_what_a_module_does_not_offer_is_marked_private():
    assert faults(MODULES, hidden_without_a_mark) == {}
