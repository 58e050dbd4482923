"""References and challenges: anything written reads back, and no input crashes the reader."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from snapshot.oci.auth import parse_challenges
from snapshot.oci.reference import Reference

WORDS = st.from_regex(r"[a-z0-9]{1,5}((\.|_|__|-{1,3})[a-z0-9]{1,5}){0,2}", fullmatch=True)
HOSTS = st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z]{1,5}){1,2}(:[1-9][0-9]{0,3})?", fullmatch=True)
TAGS = st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
DIGESTS = st.none() | st.binary(min_size=32, max_size=32).map(lambda raw: f"sha256:{raw.hex()}")


@given(HOSTS, st.lists(WORDS, min_size=1, max_size=4).map("/".join), TAGS, DIGESTS)
def test_a_reference_reads_back_as_it_is_written(registry, repository, tag, digest):
    if tag is None and digest is None:
        tag = "latest"
    reference = Reference(registry=registry, repository=repository, tag=tag, digest=digest)

    assert Reference.parse(str(reference)) == reference


@given(st.text(max_size=60) | st.text("ab/:@.-_[]0\n", max_size=30))
def test_any_text_is_a_reference_that_reads_back_or_a_configuration_error(text):
    with contextlib.suppress(ConfigError):
        reference = Reference.parse(text)

        assert Reference.parse(str(reference)) == reference
        assert ".." not in reference.repository
        assert not any(c in str(reference) for c in "\n\r ?#%\\")


@given(st.text(max_size=200) | st.text('aB=," \\', max_size=60))
def test_any_header_is_read_to_an_end(header):
    for challenge in parse_challenges(header):
        assert challenge.scheme == challenge.scheme.lower()
        assert all(name == name.lower() for name in challenge.parameters)
