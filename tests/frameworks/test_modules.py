"""The modules that need a framework say what they offer, as all others do in the base environment."""

import pytest

from tests.house import test_house_exports as house
from tests.house.modules import source_files

HOSTS = [path for path in source_files() if path.parts[1:2] == ("hosts",) and path.stem[0] != "_"]


@pytest.mark.parametrize("path", HOSTS, ids=str)
def test_what_a_module_offers_is_sorted_and_there_and_the_rest_is_private(path):
    house.test_what_a_module_offers_is_sorted_and_there(path)
    house.test_what_a_module_does_not_offer_is_marked_private(path)
