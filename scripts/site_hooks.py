"""Hooks of the site: reports, the changelog and the guide for contributors become pages, and links follow them."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["link_in_site", "on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[1]
# The site does not support a fence with words after its language: it would take the following text for code.
_FENCE = re.compile(r"^( *```[a-z]+) .+$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def _outside() -> dict[str, Path]:
    """Return the pages that lie outside ``docs``, by their place in the site."""
    folder = ROOT / "benchmarks/reports"
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.md")}
    reports = {f"reports/{place}": path for place, path in found.items()}
    return reports | {name: ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


def link_in_site(page: str, text: str, target: str, outside: dict[str, Path]) -> str:
    """Return a link for the site: to a page, or only its text if the target is no page.

    Args:
        page: Place in the site of the page that contains the link.
        text: The shown text.
        target: Target of the link, relative to the page's file in the repository.
        outside: Pages from outside ``docs``, by their place in the site.
    """
    if "://" in target or target.startswith("#"):
        return f"[{text}]({target})"
    path, _, fragment = target.partition("#")
    own = outside.get(page)
    folder = own.parent if own else (ROOT / "docs" / page).parent
    found = (folder / path).resolve()
    if (found / "README.md").is_file() and found != ROOT:
        found /= "README.md"
    places = {file: place for place, file in outside.items()}
    if found in places:
        place = places[found]
    elif found == ROOT / "README.md":
        place, fragment = "index.md", ""
    elif found.is_relative_to(ROOT / "docs") and found.suffix:
        place = found.relative_to(ROOT / "docs").as_posix()
    else:
        return text
    relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
    return f"[{text}]({relative}{'#' + fragment if fragment else ''})"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs`` to the site."""
    for place, path in _outside().items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 -- mkdocs passes them by name
    """Turn links between repository files into links between pages, and remove a fence's words for tests."""
    markdown = _FENCE.sub(r"\1", markdown)
    outside, place = _outside(), page.file.src_uri
    return _LINK.sub(lambda link: link_in_site(place, link[1], link[2], outside), markdown)
