"""Modules, functions and folders stay short enough to be read at once."""

import ast
import re
from collections import Counter
from functools import cache

from tests.house.modules import ROOT, faults, source_files, statements_of

MODULE_LINES, SHELL_LINES, FUNCTION_LINES = 400, 160, 60
CLASS_METHODS, CROWDED_CLASSES = 10, 12
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
ROOM_MODULES = 5
"""The number of modules from which a folder needs a README."""
FOLDER_MODULES = FOLDER_FILES = 16
INDEXES = ("README.md", "index.md")
"""The pages that list the contents of a folder."""
LONGER = {
    "omniload/actors/plane.py": (260, "the contract of both runtimes, not a shell"),
    "omniload/actors/heartbeat_board.py": (
        247,
        "what a role says, in memory, in a file and in its log",
    ),
    "omniload/actors/planner_journal.py": (
        190,
        "where a journal lies, how it is gone on with, and what a planner keeps in it and beside it",
    ),
    "omniload/actors/address.py": (
        212,
        "where a plane is, which ranks it serves there, who may come",
    ),
    "omniload/actors/reaper.py": (
        225,
        "the opener's side of the reaper, and the folder that both remove, whole or as it is made",
    ),
    "omniload/actors/local/plane.py": (
        400,
        "every role and rank of one process, which know each other: opened, changed, closed, and the ways between them",
    ),
    "omniload/actors/ray/keeper.py": (
        320,
        "carries out every command of the roster, hears of ends, and what loaders are added or retired",
    ),
    "omniload/actors/ray/actors.py": (
        245,
        "loaders and constructors, how each begins, where it looks, reads of one call, and what every actor answers",
    ),
    "omniload/actors/ray/planner_actor.py": (
        245,
        "how a planner begins or takes over, and what ranks, edits and the keeper ask of it",
    ),
    "omniload/actors/ray/head_watch.py": (
        210,
        "the head of a Ray, the raylet of a host, and who of both is stopped",
    ),
    "omniload/actors/ray/hosts/members.py": (180, "hosts of a job, and of a rank that joins alone"),
    "omniload/actors/ray/hosts/rank_claims.py": (
        175,
        "who has a rank, and which of them a planner that took over need not wait for",
    ),
    "omniload/actors/ray/hosts/watches.py": (
        170,
        "the watch of each host: begun, asked, heard, lost, and when another follows it",
    ),
    "omniload/actors/ray/answers.py": (290, "every way in which an answer comes or does not"),
    "omniload/actors/ray/given/detached.py": (
        400,
        "both sides of a detached plane: who may attach and where it goes on, and how a driver finds and ends it",
    ),
    "omniload/actors/ray/given/tenancy.py": (
        200,
        "what a driver asks of an opener, by what that is known, and which driver has its plane",
    ),
    "omniload/actors/ray/given/attached.py": (
        200,
        "both ways to a Ray of others: joined, or shared with whatever connected the process",
    ),
    "omniload/actors/ray/crew.py": (
        365,
        "every actor of a plane, who holds what, in which process, and which sources",
    ),
    "omniload/actors/ray/rank/ahead.py": (
        270,
        "the window at hand, the one that is asked for, at which pace, and which batches of them are lent",
    ),
    "omniload/actors/ray/rank/handle.py": (
        397,
        "follows the roles that it asks, has confirmed what is lent, and is another rank later, or stays what it is",
    ),
    "omniload/actors/ray/links/of_planner.py": (
        360,
        "the ways to both roles, which of them a source takes, reads of one call, and what is asked again of whom",
    ),
    "omniload/actors/ray/rank/planner_link.py": (
        280,
        "what a rank tells, by whom, and asks, the thread that watches, and how the next planner is found",
    ),
    "omniload/actors/ray/cluster.py": (
        400,
        "starts, joins, waits for, looks at and ends a Ray: our own, and another's",
    ),
    "omniload/actors/ray/hosts/node.py": (
        225,
        "starts a node of Ray without the processes that no data plane asks, and with what its workers are forked from",
    ),
    "omniload/actors/ray/plane.py": (245, "opens and closes every actor"),
    "omniload/actors/ray/scaling/mover.py": (
        310,
        "every step of a move, what is read ahead of it, what undoes it, and what is dropped after it",
    ),
    "omniload/actors/ray/measuring/probe.py": (
        352,
        "planes side by side, the process of each, that of a rank, and each driven at speed, at rest and with pauses",
    ),
    "omniload/actors/ray/scaling/shell.py": (
        205,
        "one look at every loader and at what is read ahead, whoever is at fault, and every change",
    ),
    "omniload/actors/roles/constructor.py": (
        370,
        "builds, asks again, gives and lends to ranks that change, and passes on what they took and what failed",
    ),
    "omniload/actors/roles/links.py": (
        310,
        "the ways to both roles, what reads take, who serves which ranks, and what comes back",
    ),
    "omniload/actors/roles/loader.py": (
        400,
        "reads ahead, opens and reads again, stands by, answers, looks for shards, hands over, and what reading costs",
    ),
    "omniload/actors/roles/sources.py": (
        296,
        "opens a source, has as many read it as are asked for, and cuts its reads",
    ),
    "omniload/actors/roles/planner.py": (400, "one thread that speaks to every other role"),
    "omniload/actors/ray/hosts/placing.py": (
        235,
        "where members are, where they may be, and for how long a node is left alone",
    ),
    "omniload/actors/ray/hosts/nodes.py": (
        270,
        "which nodes and bundles there are, for whom each has room, what is missing, and the wait for it",
    ),
    "omniload/actors/ray/measuring/spent.py": (
        195,
        "what processes take, by role, and what a call between two of them takes at both ends",
    ),
    "omniload/actors/ray/changes.py": (
        295,
        "each kind of change, who hears of it in which order, and is told once more",
    ),
}
"""Modules that may be longer: the limit in lines, and the reason."""


def limit_of(path):
    usual = SHELL_LINES if path.parts[:2] == ("omniload", "actors") else MODULE_LINES
    return LONGER.get(str(path), (usual,))[0]


def lines_over_the_limit(path):
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    return lines if lines > limit_of(path) else None


def longer_functions(path):
    functions = (node for node in statements_of(path) if isinstance(node, FUNCTION))
    sizes = {f"{f.name}:{f.lineno}": (f.end_lineno or 0) - f.lineno + 1 for f in functions}
    return {name: size for name, size in sizes.items() if size > FUNCTION_LINES}


def test_every_module_is_short():
    assert faults(source_files(), lines_over_the_limit) == {}


def test_every_function_fits_a_screen():
    assert faults(source_files(), longer_functions) == {}


def test_every_folder_is_looked_through_at_a_glance():
    beside = (
        path
        for place in ("tests", "benchmarks", "examples")
        for path in (ROOT / place).rglob("*.py")
    )
    paths = [*source_files(), *(path.relative_to(ROOT) for path in beside)]
    modules = Counter(path.parent for path in paths if path.name != "__init__.py")

    assert {str(folder): num for folder, num in modules.items() if num > FOLDER_MODULES} == {}


def pages_in(*places):
    """Return pages, pictures and reports, relative to the repository, except the lists of a folder's contents."""
    files = (path for place in places for path in (ROOT / place).rglob("*") if path.is_file())
    return [path.relative_to(ROOT) for path in files if path.name not in INDEXES]


def test_every_folder_of_pages_and_of_reports_is_looked_through_at_a_glance():
    files = Counter(path.parent for path in pages_in("docs", "benchmarks/reports"))

    assert {str(folder): num for folder, num in files.items() if num > FOLDER_FILES} == {}, (
        "give a part of it a folder of its own; of reports, drop those that no page names any more"
    )


@cache
def named_by(folder):
    """Return the files that the lists of a folder link to, relative to the repository."""
    lists = (folder / name for name in INDEXES if (folder / name).is_file())
    text = "".join(path.read_text(encoding="utf-8") for path in lists)
    links = re.findall(r"\]\(([^)#\s]+)", text)
    paths = {(folder / link).resolve() for link in links if "://" not in link}
    return {path.relative_to(ROOT) for path in paths}


def test_every_page_is_named_by_the_list_of_its_folder_or_of_the_one_around_it():
    pages = [path for path in pages_in("docs") if path.suffix == ".md"]
    listed = {
        path: named_by(ROOT / path.parent) | named_by(ROOT / path.parent.parent) for path in pages
    }

    assert len(pages) > 50
    assert [str(path) for path in pages if path not in listed[path]] == []


def test_every_folder_of_several_modules_says_what_it_is_for():
    modules = Counter(path.parent for path in source_files() if path.name != "__init__.py")

    rooms = [folder for folder, num in modules.items() if num >= ROOM_MODULES]
    assert [str(room) for room in rooms if not (ROOT / room / "README.md").is_file()] == []


def classes_of_many_methods(path):
    classes = (node for node in statements_of(path) if isinstance(node, ast.ClassDef))
    numbers = {
        found.name: sum(isinstance(part, FUNCTION) for part in found.body) for found in classes
    }
    return {name: number for name, number in numbers.items() if number > CLASS_METHODS}


def test_few_classes_of_fusefs_have_many_methods_but_for_stores_and_bridges_whose_calls_they_answer():
    crowded = faults(
        [path for path in source_files() if path.parts[0] == "fusefs"], classes_of_many_methods
    )

    assert sum(map(len, crowded.values())) <= CROWDED_CLASSES, crowded
