"""The site is built without a warning, and links lead from page to page."""

import html
import importlib.util
import os
import re
import subprocess
import sys

import pytest

import omniload
import trainer_integration
from tests.docs.snippets import ROOT
from tests.docs.test_docs_links import without_fences

pytest.importorskip("mkdocs")


def hooks():
    path = ROOT / "docs/site_hooks.py"
    spec = importlib.util.spec_from_file_location("site_hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OUTSIDE = {"reports/a.md": ROOT / "benchmarks/reports/a.md", "CHANGELOG.md": ROOT / "CHANGELOG.md"}


@pytest.mark.parametrize(
    ("page", "target", "expected"),
    [
        ("how-to.md", "#here", "[text](#here)"),
        ("how-to.md", "https://example.org/a.md", "[text](https://example.org/a.md)"),
        ("how-to.md", "reference/mix.md#pack", "[text](reference/mix.md#pack)"),
        ("how-to.md", "../benchmarks/reports/a.md", "[text](reports/a.md)"),
        ("design/0010-fusefs-format.md", "../../CHANGELOG.md", "[text](../CHANGELOG.md)"),
        ("CHANGELOG.md", "docs/how-to.md", "[text](how-to.md)"),
        ("CHANGELOG.md", "README.md#measured", "[text](index.md)"),
        ("how-to.md", "../examples/train.yaml", "text"),
    ],
)
def test_a_link_of_the_repository_becomes_one_of_the_site(page, target, expected):
    assert hooks().link_in_site(page, "text", target, OUTSIDE) == expected


def headings_of(page):
    """Return the words of the headings of a page of the repository, without their marks."""
    found = re.findall(r"^##+ (.+)$", without_fences(page), re.MULTILINE)
    return {re.sub(r"\W+", " ", html.unescape(text)).strip() for text in found}


def shown_in(page):
    """Return the words of the headings of a page of the site."""
    found = re.findall(
        r"<h[2-6][^>]*>(.*?)<a class=\"headerlink", page.read_text("utf-8"), re.DOTALL
    )
    return {re.sub(r"\W+", " ", without_tags(text)).strip() for text in found}


def without_tags(text):
    return html.unescape(re.sub(r"<[^>]+>", "", text))


API = {"api/omniload.html": omniload, "api/dataloader.html": trainer_integration}


@pytest.mark.parametrize(("page", "package"), API.items())
def test_the_reference_has_what_a_package_offers_by_the_name_that_is_imported(page, package):
    text = (ROOT / "docs" / page).with_suffix(".md").read_text(encoding="utf-8")

    named = re.findall(r"^::: (.+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(f"{package.__name__}.{name}" for name in package.__all__)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    for page in ("index.html", "data-plane.html", "fusefs.html", "snapshot.html"):
        assert (tmp_path / "site" / page).exists()
    swallowed = {
        page.name: missing
        for page in (ROOT / "docs").glob("how-to*.md")
        if (missing := headings_of(page) - shown_in(tmp_path / "site" / f"{page.stem}.html"))
    }
    assert swallowed == {}, "headings that the site takes for code"
    for page, package in API.items():
        text = (tmp_path / "site" / page).read_text(encoding="utf-8")
        headings = set(re.findall(r"<h2 id=\"([^\"]+)\"", text))
        assert headings == {f"{package.__name__}.{name}" for name in package.__all__}
    signature = without_tags((tmp_path / "site/api/dataloader.html").read_text(encoding="utf-8"))
    assert "prefetch_factor: int | None = None" in signature
    assert 'on_hang: Literal["raise", "replace"]' in signature
