"""The modules that need a framework say what they offer, as all others do in the base environment."""

from tests.house import test_house_exports as house
from tests.house.modules import faults, framework_files

HOSTS = [path for path in framework_files() if path.stem[0] != "_"]


def test_what_a_module_offers_is_sorted_and_there_and_the_rest_is_private():
    assert len(HOSTS) >= 9
    assert faults(HOSTS, house.unsorted) == {}
    assert faults(HOSTS, house.absent) == {}
    assert faults(HOSTS, house.hidden_without_a_mark) == {}
