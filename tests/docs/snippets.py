"""Fenced blocks of the documentation."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

__all__ = [
    "FRAMEWORK_PAGES",
    "LANGUAGES",
    "ROOT",
    "TORCHRUN_PAGES",
    "Block",
    "blocks_of",
    "documents",
    "page_of",
    "parse_blocks",
    "run_page",
]

ROOT = Path(__file__).parents[2]
LANGUAGES = {"", "python", "yaml", "toml", "console", "sh"}
"""What a fence may be labelled; a sketch has no label, and is not checked."""

FRAMEWORK_PAGES = {
    "how-to/running/watch.md",
    "how-to/trainers/accelerate.md",
    "how-to/trainers/huggingface-trainer.md",
    "how-to/trainers/jax.md",
    "how-to/trainers/lightning.md",
    "how-to/trainers/torchtitan.md",
}
"""Pages whose blocks need a framework, or make one warn: tests/frameworks/test_pages.py runs them."""

TORCHRUN_PAGES = {
    "how-to/trainers/context-parallel.md",
    "how-to/trainers/fsdp.md",
    "how-to/trainers/pipeline.md",
    "how-to/trainers/torchrun.md",
}
"""Pages whose Python is a script for several ranks: test_docs_torchrun.py starts them."""

_FENCE = re.compile(r"^( *)(```+)\s*(.*?)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What stands between two fences."""

    path: Path
    line: int
    """Line of the file that the text begins on, from 1."""
    info: tuple[str, ...]
    """Words after the fence."""
    text: str

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def where(self) -> str:
        """Path and line, as editors open them."""
        return f"{self.path}:{self.line}"

    def compiled(self) -> CodeType:
        """Return the code; a traceback shows the document's own lines."""
        return compile("\n" * (self.line - 1) + self.text, str(self.path), "exec")

    def commands(self) -> Iterator[tuple[int, str]]:
        """Yield line number and text of every command: after ``$`` in a console, every line of a script."""
        lines = enumerate(self.text.splitlines(), start=self.line)
        for number, line in lines:
            prompted = line.startswith("$ ")
            if self.language == "console" and not prompted:
                continue
            command = line.removeprefix("$ ")
            while command.endswith("\\"):
                command = command[:-1] + next(lines)[1]
            yield number, command


def documents() -> list[Path]:
    """Return the pages, README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page_of(path: Path) -> str:
    """Return a page by its path below ``docs``, or ``README.md`` of the repository."""
    return path.relative_to(ROOT).as_posix().removeprefix("docs/")


def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a document, in order."""
    return parse_blocks(path.read_text(encoding="utf-8"), path)


def parse_blocks(text: str, path: Path) -> list[Block]:
    """Return the blocks of Markdown text; a fence that is never closed is an error."""
    blocks: list[Block] = []
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        opening = _FENCE.match(line)
        if opening is None:
            continue
        indent, fence, info = opening.groups()
        held: list[str] = []
        for _, inner in lines:
            if inner.strip() == fence:
                break
            held.append(inner.removeprefix(indent))
        else:
            raise AssertionError(f"{path}:{number}: the fence is never closed")
        body = "".join(f"{each}\n" for each in held)
        blocks.append(Block(path=path, line=number + 1, info=tuple(info.split()), text=body))
    return blocks


def run_page(path: Path, file_of: Callable[[Block], str]) -> int:
    """Run a page's Python blocks in this folder, one after the other, and save its YAML as a reader would.

    Args:
        path: The page.
        file_of: Returns the file that a block of YAML stands for.

    Returns:
        How many blocks ran.
    """
    namespace = {"__name__": "__main__"}
    ran = 0
    for block in blocks_of(path):
        if block.info == ("yaml",):
            Path(file_of(block)).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(block.compiled(), namespace)  # the point of this function
            ran += 1
    return ran
