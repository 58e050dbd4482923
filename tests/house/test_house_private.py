"""No test reaches into another object: tests observe behaviour, which outlives the code inside."""

import ast
import re

from tests.house.modules import ROOT, faults

FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))
OFFERED = {"_replace", "_asdict", "_make", "_fields", "_exit"}
"""Names that the standard library offers with an underscore."""
OF_OTHERS = {"_reset_state", "_is_accelerate_prepared"}
"""Private names of accelerate, which offers no public way."""
REACHED = {
    "tests/faults/omniload/test_actors_faults.py": 2,
    "tests/faults/omniload/test_actors_waits.py": 3,
    "tests/faults/test_fusefs_disk_faults.py": 2,
    "tests/faults/test_fusefs_disk_threads.py": 1,
    "tests/integration/omniload/actors/test_ray.py": 3,
    "tests/integration/omniload/actors/test_reaper.py": 2,
    "tests/integration/trainer_integration/loader/test_data_loader_sealing.py": 2,
    "tests/integration/fusefs/stores/test_native_hdfs.py": 4,
    "tests/integration/fusefs/bridge/test_umount.py": 3,
    "tests/property/fusefs/read/test_readahead.py": 3,
    "tests/property/fusefs/vfs/test_session.py": 1,
    "tests/property/fusefs/vfs/test_versions.py": 1,
    "tests/support/fusefs/disk.py": 5,
    "tests/unit/fusefs/bridge/device/test_loop.py": 3,
    "tests/unit/fusefs/stores/remote/test_native_hdfs.py": 6,
    "tests/unit/fusefs/stores/test_handle_cache.py": 4,
    "tests/unit/fusefs/tree/test_publish.py": 5,
    "tests/unit/fusefs/tree/test_request_counts.py": 4,
    "tests/unit/fusefs/vfs/test_session.py": 1,
    "tests/unit/fusefs/vfs/test_versions.py": 2,
    "tests/unit/omniload/actors/roles/test_shells.py": 1,
    "tests/unit/omniload/base/concurrency/test_threads.py": 1,
    "tests/unit/omniload/machine/test_planner.py": 5,
}
"""The number of files that still reach into objects; the list may only grow shorter."""
OF_ANOTHER = re.compile(r"(?<!\bself)(?<!\bcls)\._[a-zA-Z]")
"""A pattern that every access to a private attribute of another object matches, so most files need no parsing."""


def reached_into(path):
    """Yield each private attribute that belongs to another object than the method's own.

    Private names of modules do not count, because a function is no object with a state to reach into.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    if not OF_ANOTHER.search(text):
        return
    tree = ast.parse(text)
    imported = {
        name.asname or name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        base = node.value
        is_own = (isinstance(base, ast.Name) and base.id in imported | {"self", "cls"}) or (
            isinstance(base, ast.Call) and ast.unparse(base.func) == "super"
        )
        if not is_own and not node.attr.startswith("__") and node.attr not in OFFERED | OF_OTHERS:
            yield f"{node.lineno}: {ast.unparse(node)}"


def more_than_before(path):
    found = list(reached_into(path))
    return found if len(found) > REACHED.get(str(path), 0) else None


def test_no_test_reaches_into_another_object():
    assert faults(FILES, more_than_before) == {}
