"""What others may put beside a journal on a store: links, forged names and claims; and listings of no one moment."""

import orjson
import pytest

from fusefs.stores.memory import MemoryStore
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.mix.journal.object_storage import ObjectStorage
from omniload.mix.journal.place import journal_at

FORGED = "99999998-00000000"


def a_planner(store, *content):
    """Return a planner that has claimed the journal, begun it, and added to it."""
    holder = ObjectStorage(store)
    holder.claim()
    holder.begin(b"base\n")
    for each in content:
        holder.append(each)
    return holder


def content_of(store):
    with ObjectStorage(store).opened() as file:
        return file.read()


def test_a_link_in_place_of_a_run_is_not_followed(tmp_path):
    url = f"file://{tmp_path}/journals"
    (tmp_path / "victim").mkdir()
    (tmp_path / "journals").mkdir()
    (tmp_path / "journals" / "run").symlink_to(tmp_path / "victim")

    with pytest.raises(ConfigError, match=r"a link below runtime\.journal is not followed"):
        journal_at(tmp_path / "run", url)

    assert list((tmp_path / "victim").iterdir()) == []


def test_the_url_itself_may_lead_through_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "journals").symlink_to(tmp_path / "disk")

    journal_at(tmp_path / "run", f"file://{tmp_path}/journals").claim()

    assert (tmp_path / "disk" / "run" / "claims").is_dir()


@pytest.mark.parametrize(
    "says",
    [[], "text", {"version": 1, "pid": 1e308, "host": "h"}, {"version": 1, "pid": 1, "host": []}],
    ids=str,
)
def test_a_claim_that_says_what_none_of_ours_does_is_named_by_its_file(says):
    store = MemoryStore()
    holder = a_planner(store)
    store.publish(f"claims/{FORGED}", orjson.dumps(says))

    with pytest.raises(StateError, match=f"planner {FORGED} has taken the journal over"):
        holder.append(b"more\n")


@pytest.mark.parametrize(
    "path",
    ["claims/99999999-00000000", "lines/" + "9" * 16 + "-" + "9" * 16 + "-99999999-00000000"],
)
def test_a_name_with_the_last_number_there_is_is_told_with_its_remedy(path):
    store = MemoryStore()
    a_planner(store)
    store.publish(path, b"")

    with pytest.raises(StateError, match="remove what names 99999999-00000000"):
        ObjectStorage(store).claim()


class Passed(MemoryStore):
    """Lists a folder a part at a time, as stores do: what is put behind the lister's back is not shown."""

    def __init__(self):
        super().__init__()
        self.hidden = []

    def listing(self, path):
        hidden = self.hidden.pop() if self.hidden else ""
        shown = super().listing(path)
        return [entry for entry in shown if not (hidden and entry.name.startswith(hidden))]


def test_a_segment_that_a_listing_passed_by_is_looked_for_again():
    store = Passed()
    a_planner(store, b"one\n", b"two\n")

    store.hidden = ["0000000000000005-"]

    assert content_of(store) == b"base\none\ntwo\n"


def test_a_segment_that_is_missing_twice_is_missing():
    store = Passed()
    a_planner(store, b"one\n", b"two\n")
    store.hidden = ["0000000000000005-"] * 2

    with pytest.raises(IntegrityError, match="bytes 5 to 9 of the journal lie in no segment"):
        content_of(store)
