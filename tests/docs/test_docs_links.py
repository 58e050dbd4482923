"""Links between pages lead somewhere, and pages keep their promised form."""

import re

import pytest

from tests.docs.snippets import ROOT, blocks_of, documents

DOCUMENTS = [
    *documents(),
    *(ROOT / page for page in ("CHANGELOG.md", "CONTRIBUTING.md", "omniload/README.md")),
]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


def without_fences(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    for block in blocks_of(path):
        for at in range(block.line - 1, block.line - 1 + block.text.count("\n")):
            lines[at] = ""
    return "\n".join(lines)


def anchors_of(path):
    """Return the fragments that GitHub gives the headings of a page."""
    headings = _HEADING.findall(without_fences(path))
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links_of(path):
    prose = re.sub(r"`[^`\n]*`", "code", without_fences(path))
    return [link for link in _LINK.findall(prose) if "://" not in link]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading_that_exist(path):
    broken = []
    for link in links_of(path):
        target, _, fragment = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        if not found.exists() or (fragment and fragment not in anchors_of(found)):
            broken.append(link)

    assert broken == []


def test_a_link_in_code_is_no_link(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](b.md) `[c](d.md)`\n```\n[e](f.md)\n```\n", encoding="utf-8")

    assert links_of(page) == ["b.md"]


def test_headings_become_the_fragments_that_a_browser_is_sent_to(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# sources.NAME of type bpe\n## Use `cu_seqlens`, twice\n```\n# a comment\n```\n",
        encoding="utf-8",
    )

    assert anchors_of(page) == {"sourcesname-of-type-bpe", "use-cu_seqlens-twice"}


def test_the_glossary_is_in_alphabetical_order_and_names_each_word_once():
    rows = re.findall(
        r"^\| \*\*(.+?)\*\* \|",
        (ROOT / "docs/glossary.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )

    assert len(rows) > 20
    assert rows == sorted(set(rows), key=str.lower)


def test_every_entry_of_the_log_has_a_date_and_three_lines():
    text = (ROOT / "docs/log.md").read_text(encoding="utf-8")
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]

    assert entries
    for entry in entries:
        title, *lines = entry.strip().splitlines()
        assert re.match(r"\d{4}-\d{2}-\d{2}: ", title), title
        labels = [line.split("**")[1] for line in lines if line.strip()]
        assert labels == ["Tried.", "Found.", "Instead."], title


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/design").rglob("[0-9]*.md")), ids=lambda p: p.stem[:4]
)
def test_a_design_note_is_numbered_and_says_goals_design_rejected_and_consequences(path):
    text = path.read_text(encoding="utf-8")

    assert re.match(r"# \d{4} ", text)
    assert text.startswith(f"# {path.stem[:4]} ")
    for part in ("Goals", "Rejected", "Consequences"):
        assert re.search(rf"^(\*\*{part}\.?\*\*|## {part}\b)", text, re.MULTILINE), part
