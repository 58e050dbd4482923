"""Pages that a user follows, and examples, name what is public alone."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, blocks_of, documents, page_of

OURS = ("omniload", "fusefs", "snapshot", "trainer_integration")
PUBLIC = (
    "omniload",
    "snapshot.startup",
    "trainer_integration",
    "trainer_integration.hosts.accelerate",
    "trainer_integration.hosts.huggingface",
    "trainer_integration.hosts.lightning",
    "trainer_integration.hosts.megatron",
    "trainer_integration.hosts.torchtitan",
)
"""Modules that a user imports from: what they list in ``__all__`` is public."""
EXCEPTIONS = {
    "examples/demo.py": "kills a rank of the included trainer and draws on the display of its run",
    "examples/demo_hosts.py": "does the same on two hosts, and reads the status and the log of its run",
    "how-to/data/image-encoder.md": "shows the included model, which is read and copied; the page says that it changes",
    "how-to/trainers/included-trainer.md": "names the reader of its weights; the page says that it changes",
}
"""What needs more, and why."""
FOLLOWED = ("how-to/", "migrate/")
"""Folders of such pages; those beside them, but for design, logs and words, are such pages too."""
OTHERS = {"glossary.md", "log.md", "measured.md"}

_DOTTED = re.compile(rf"`((?:{'|'.join(OURS)})(?:\.\w+)+)(?=[`(])")


def followed():
    """Return what a user follows, by name."""
    pages = {page_of(path): path for path in documents()}
    examples = sorted((ROOT / "examples").glob("*.py"))
    return {
        page: path
        for page, path in pages.items()
        if page.startswith(FOLLOWED) or ("/" not in page and page not in OTHERS)
    } | {f"examples/{path.name}": path for path in examples}


def listed(module: str) -> list[str]:
    """Return what a public module offers, also where the framework is missing that it is for."""
    folder = ROOT.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} lists nothing in __all__")


def is_public(name: str) -> bool:
    """Tell whether a dotted name is a public module, or what one offers or holds within that."""
    within = [module for module in PUBLIC if name.startswith(f"{module}.")]
    return name in PUBLIC or any(
        name.removeprefix(f"{module}.").partition(".")[0] in listed(module) for module in within
    )


def named_in_code(code: str) -> set[str]:
    """Return the dotted names of ours that Python imports, or reads as ``omniload.NAME``."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "omniload":
            names.add(f"omniload.{node.attr}")
    return {name for name in names if name.partition(".")[0] in OURS}


def inner_names(path: Path) -> list[str]:
    """Return names of a page or script that are not public."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        names = named_in_code(text)
    else:
        codes = [block.text for block in blocks_of(path) if block.language == "python"]
        names = set(_DOTTED.findall(text)).union(*map(named_in_code, codes))
    return sorted(name for name in names if not is_public(name))


@pytest.mark.parametrize("page", sorted(followed().keys() - EXCEPTIONS.keys()))
def test_what_a_user_follows_names_what_is_public_alone(page):
    assert inner_names(followed()[page]) == [], "use a public name: docs/reference/README.md"


@pytest.mark.parametrize("page", EXCEPTIONS)
def test_an_exception_still_names_more(page):
    assert inner_names(followed()[page])


@pytest.mark.parametrize("module", PUBLIC)
def test_what_is_public_can_be_found_in_the_pages(module):
    codes = [
        block.text
        for path in documents()
        for block in blocks_of(path)
        if block.language == "python"
    ]

    assert any(module == name.rpartition(".")[0] for code in codes for name in named_in_code(code))


def test_names_are_told_apart():
    code = "import numpy\nfrom omniload import Loader, Loadr\nomniload.open('x').start()\n"
    inside = "def f():\n    from fusefs.base import x\n    import omniload.plan.dgraph\n"

    assert named_in_code(code) == {"omniload.Loader", "omniload.Loadr", "omniload.open"}
    assert named_in_code(inside) == {"fusefs.base.x", "omniload.plan.dgraph"}
    assert [is_public(name) for name in ("omniload.Loader", "omniload.QuadraticCost.fit")] == [
        True
    ] * 2
    assert not any(map(is_public, ["omniload.Loadr", "omniload.plan.dgraph", "fusefs.base.x"]))


def test_a_page_is_read_in_its_blocks_and_its_text(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "All are `omniload.base.errors.OmniloadError`, or `omniload.open(mix)`.\n\n"
        "```python\nfrom omniload.plan.dgraph import DGraph\n```\n"
    )

    assert inner_names(page) == [
        "omniload.base.errors.OmniloadError",
        "omniload.plan.dgraph.DGraph",
    ]
