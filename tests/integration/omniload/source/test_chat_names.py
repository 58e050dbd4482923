"""A run over conversations resumes under the names with which it began, and under no others."""

import orjson
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import StateError
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.chats import CHATML, conversations
from tests.support.plane.builders import a_mix

STEPS = 6
NAMES = {
    "content": "value",
    "roles": {"system": "system", "user": "user", "assistant": "assistant"},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "chatml.jinja").write_text(CHATML)
    chats = conversations(80)
    # Each message contains its text twice, so that the data can be read under either name.
    both = [[each | {"value": each["content"]} for each in chat] for chat in chats]
    lines = b"".join(orjson.dumps({"messages": chat}) + b"\n" for chat in both)
    (tmp_path / "chats.jsonl").write_bytes(lines)
    return tmp_path


def steps(folder, *, names=None, state=None, stop=STEPS):
    """Return the tokens of the steps up to ``stop``, and the state then."""
    chat = {"type": "chat", "template": "chatml.jinja"}
    chat |= {} if names is None else {"messages": names}
    source = {"type": "jsonl", "path": "chats.jsonl", "text": "messages", "transforms": [chat]}
    mix = a_mix(sources={"web": source}, tokenizer={"type": "bytes"}, length=512)
    spec = PlaneSpec(
        mix=mix, base_dir=folder, tree=ClientPlaceTree.of(), state=state, num_steps=STEPS
    )
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        taken = [client.next_batch() for _ in range(stop - client.next_step)]
        rows = [[each.tokens_RT.tolist() for each in batch.microbatches] for batch in taken]
        return rows, client.state_dict()


@pytest.mark.parametrize("names", [None, {}, NAMES])
def test_a_run_goes_on_under_the_names_that_it_began_with(folder, names):
    whole, _ = steps(folder)
    began = None if names == {} else names  # the names of templates are the default
    first, state = steps(folder, names=began, stop=3)

    rest, _ = steps(folder, names=names, state=state)

    assert first + rest == whole


@pytest.mark.parametrize(("before", "after"), [(None, NAMES), (NAMES, None)])
def test_a_run_is_not_gone_on_with_under_other_names(folder, before, after):
    _, state = steps(folder, names=before, stop=3)

    with pytest.raises(StateError, match=r"sources\.web"):
        steps(folder, names=after, state=state)
