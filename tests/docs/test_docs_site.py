"""The site is built without a warning, and links lead from page to page."""

import html
import importlib.util
import os
import re
import sys

import pytest

import omniload
import snapshot.startup
import trainer_integration
from tests.docs.snippets import ROOT
from tests.docs.test_docs_links import without_fences
from tests.support.programs import finished

pytest.importorskip("mkdocs")


def hooks():
    path = ROOT / "scripts/site_hooks.py"
    spec = importlib.util.spec_from_file_location("site_hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OUTSIDE = {
    "reports/planner/a.md": ROOT / "benchmarks/reports/planner/a.md",
    "CHANGELOG.md": ROOT / "CHANGELOG.md",
}


@pytest.mark.parametrize(
    ("page", "target", "expected"),
    [
        ("tutorial.md", "#here", "[text](#here)"),
        ("tutorial.md", "https://example.org/a.md", "[text](https://example.org/a.md)"),
        ("tutorial.md", "reference/mix.md#pack", "[text](reference/mix.md#pack)"),
        ("tutorial.md", "../benchmarks/reports/planner/a.md", "[text](reports/planner/a.md)"),
        ("migrate/mosaic.md", "../../CHANGELOG.md", "[text](../CHANGELOG.md)"),
        ("migrate/mosaic.md", "../tutorial.md", "[text](../tutorial.md)"),
        ("migrate/mosaic.md", "../migrate/", "[text](README.md)"),
        ("CHANGELOG.md", "docs/tutorial.md", "[text](tutorial.md)"),
        ("CHANGELOG.md", "README.md#measured", "[text](index.md)"),
        ("tutorial.md", "../examples/train.yaml", "text"),
    ],
)
def test_a_link_of_the_repository_becomes_one_of_the_site(page, target, expected):
    assert hooks().link_in_site(page, "text", target, OUTSIDE) == expected


def headings_of(page):
    """Return the words of the headings of a page of the repository, without their marks."""
    found = re.findall(r"^##+ (.+)$", without_fences(page), re.MULTILINE)
    return {re.sub(r"\W+", " ", html.unescape(text)).strip() for text in found}


def in_site(page):
    """Return where the site has a page of the repository."""
    name = "index" if page.stem == "README" else page.stem
    return page.relative_to(ROOT / "docs").with_name(f"{name}.html")


def shown_in(page):
    """Return the words of the headings of a page of the site."""
    found = re.findall(
        r"<h[2-6][^>]*>(.*?)<a class=\"headerlink", page.read_text("utf-8"), re.DOTALL
    )
    return {re.sub(r"\W+", " ", without_tags(text)).strip() for text in found}


def without_tags(text):
    return html.unescape(re.sub(r"<[^>]+>", "", text))


API = {
    omniload: ("omniload", "planning"),
    trainer_integration: ("dataloader", "checkpoints"),
    snapshot.startup: ("startup",),
}


@pytest.mark.parametrize(("package", "pages"), API.items())
def test_the_reference_has_what_a_package_offers_by_the_name_that_is_imported(package, pages):
    folder = ROOT / "docs/reference/api"
    text = "".join((folder / f"{page}.md").read_text(encoding="utf-8") for page in pages)

    named = re.findall(r"^::: (.+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(f"{package.__name__}.{name}" for name in package.__all__)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings")
    done = finished(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        limit_s=240,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )

    assert done.returncode == 0, done.stderr[-3000:]
    for page in ("index.html", "data-plane.html", "migrate/index.html"):
        assert (tmp_path / "site" / page).exists()
    swallowed = {
        page: missing
        for page in sorted((ROOT / "docs/how-to").rglob("*.md"))
        if (missing := headings_of(page) - shown_in(tmp_path / "site" / in_site(page)))
    }
    assert swallowed == {}, "headings that the site takes for code"
    for package, pages in API.items():
        folder = tmp_path / "site/reference/api"
        text = "".join((folder / f"{page}.html").read_text(encoding="utf-8") for page in pages)
        headings = set(re.findall(r"<h2 id=\"([^\"]+)\"", text))
        assert headings == {f"{package.__name__}.{name}" for name in package.__all__}
    signature = without_tags(
        (tmp_path / "site/reference/api/dataloader.html").read_text(encoding="utf-8")
    )
    assert "prefetch_factor: int | None = None" in signature
    assert 'on_hang: Literal["raise", "replace"]' in signature
