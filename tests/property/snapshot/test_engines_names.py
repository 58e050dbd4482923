"""Any name that is looked up in a layer store is one reference, written in one way, or nothing."""

import base64
import string

from hypothesis import given
from hypothesis import strategies as st

from snapshot.engines.podman.images import digest_of_name, reference_of
from snapshot.oci.reference import Reference

WORDS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
REGISTRIES = st.builds("{}.example{}".format, WORDS, st.sampled_from(["", ":5000"]))
TAGS = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=12)
REFERENCES = st.builds(
    Reference,
    registry=REGISTRIES,
    repository=st.lists(WORDS, min_size=1, max_size=3).map("/".join),
    tag=TAGS,
)
NAMES = (
    st.binary(max_size=60)
    | st.text(string.printable, max_size=60).map(lambda text: base64.b64encode(text.encode()))
    | st.binary(max_size=40).map(base64.b64encode)
)


@given(NAMES)
def test_a_name_of_any_bytes_is_nothing_or_the_one_name_of_a_reference(name):
    found = reference_of(name)

    if found is not None:
        assert base64.b64encode(str(found).encode()) == name


@given(REFERENCES)
def test_every_reference_is_found_by_its_name_and_only_where_allowed(reference):
    name = base64.b64encode(str(reference).encode())

    assert reference_of(name) == reference
    assert reference_of(name, {reference.registry}) == reference
    assert reference_of(name, {"elsewhere.test"}) is None  # no drawn registry has this name


@given(REFERENCES, st.data())
def test_a_name_with_one_byte_changed_is_another_reference_or_none(reference, data):
    name = bytearray(base64.b64encode(str(reference).encode()))
    at = data.draw(st.integers(0, len(name) - 1))
    name[at] ^= data.draw(st.integers(1, 255))

    assert reference_of(bytes(name)) != reference


@given(st.binary(max_size=80) | st.text("0123456789abcdef:sh", max_size=80).map(str.encode))
def test_a_layer_name_of_any_bytes_is_a_digest_or_nothing(name):
    found = digest_of_name(name)

    assert found is None or (found.encode() == name and "/" not in found)
