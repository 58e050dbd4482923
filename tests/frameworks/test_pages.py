"""The pages on frameworks run as they are printed."""

import pytest

from tests.docs.conftest import corpus, drawn, work  # noqa: F401 -- fixtures of the documents' tests
from tests.docs.snippets import FRAMEWORK_PAGES, ROOT, run_page


@pytest.mark.parametrize("name", sorted(FRAMEWORK_PAGES))
def test_the_python_blocks_of_a_page_run_one_after_the_other(name, work, leaves_nothing_behind):  # noqa: F811
    assert run_page(ROOT / "docs" / name, lambda _: "mix.yaml")
