"""No secret is shown in any place: a canary in every URL and option, and every output."""

import logging
import pickle
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base import errors
from omniload.base.errors import OmniloadError, StateError
from omniload.base.log import set_up_logging
from omniload.base.secrets import note_secret, note_secrets_of, without_secrets

CANARY = "cAnArY+7/x=="
QUOTED = quote(CANARY, safe="")

SHOWN = {
    f"s3://KEY:{QUOTED}@bucket/x": "s3://***@bucket/x",
    f"s3://KEY:{CANARY}@bucket/x": "s3://***@bucket/x",
    f"sftp://me:{QUOTED}@host:22/x": "sftp://***@host:22/x",
    f"https://{QUOTED}@host/x": "https://***@host/x",
    f"https://host/x?X-Amz-Signature={QUOTED}&a=1": "https://host/x?X-Amz-Signature=***&a=1",
    f"abfs://c@account/x?sas_token={QUOTED}": "abfs://c@account/x?sas_token=***",
    f"omnifs://d::s3://K:{QUOTED}@b/x": "omnifs://d::s3://***@b/x",
    f"fsspec+sftp://u:{QUOTED}@h/x": "fsspec+sftp://***@h/x",
}
PLAIN = [
    "hdfs://nn:9000/jobs@2",
    "hdfs://me@nn:9000/jobs",
    "abfs://container@account.dfs.core.windows.net/x",
    "s3://bucket/x?region=us-east-1&endpoint_override=127.0.0.1:1",
    "hdfs+native://nn:9000/jobs?replication=0",
    "a:b@c",
]


@pytest.mark.parametrize("url", SHOWN)
def test_a_url_is_shown_without_its_secrets(url):
    said = f"store {url!r}: it failed; see {url} (and 'more')"

    assert (
        without_secrets(said) == f"store {SHOWN[url]!r}: it failed; see {SHOWN[url]} (and 'more')"
    )


@pytest.mark.parametrize("url", PLAIN)
def test_a_url_without_secrets_is_shown_as_it_is(url):
    assert without_secrets(f"store {url!r}") == f"store {url!r}"


@given(st.text(max_size=60))
def test_what_is_shown_once_stays_as_it_is(text):
    shown = without_secrets(text)
    assert without_secrets(shown) == shown
    assert "://" in text or shown == text


@given(
    st.sampled_from(["s3", "sftp", "https", "webhdfs", "ftp"]),
    st.text("abcXYZ09+/=@:%", min_size=6, max_size=40),
)
def test_no_password_is_shown_once_it_was_noted(scheme, password):
    secret = f"-{password}-"
    url = f"{scheme}://me:{quote(secret, safe='')}@host/x"
    note_secrets_of(url)

    # As libraries quote it: decoded, on its own, within another text.
    for said in (url, f"cannot log in with {secret!r}", f"({quote(secret, safe='')})"):
        assert secret not in without_secrets(said)
        assert quote(secret, safe="") not in without_secrets(said)


def test_a_short_password_with_blanks_is_not_shown_with_its_url():
    note_secrets_of("sftp://short:p w@host/x")

    assert without_secrets("'sftp://short:p w@host/x': refused") == "'sftp://***host/x': refused"


def test_a_secret_that_holds_another_is_hidden_whole():
    for secret in ("part-of-a-secret", "a part-of-a-secret and its rest"):
        note_secret(secret)

    assert without_secrets("(a part-of-a-secret and its rest)") == "(***)"


def test_secrets_of_options_are_noted_however_deep_they_lie():
    note_secrets_of(
        "sftp://h/x", {"password": "deep-canary-1", "client": {"secret": "deep-canary-2"}}
    )

    assert without_secrets("deep-canary-1 deep-canary-2 deep") == "*** *** deep"


OURS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OmniloadError)
]


@pytest.mark.parametrize("kind", OURS)
def test_no_error_of_ours_carries_a_secret(kind):
    error = kind(f"store 's3://K:{QUOTED}@bucket' does not answer")

    assert str(pickle.loads(pickle.dumps(error))) == "store 's3://***@bucket' does not answer"


def test_neither_the_log_nor_a_traceback_in_it_shows_a_secret(capsys):
    note_secret("canary-of-a-library")
    set_up_logging("INFO", role="fs")
    logger = logging.getLogger("omniload.test")

    def fail():
        raise OSError(f"s3://K:{QUOTED}@bucket refuses canary-of-a-library")

    try:
        fail()
    except OSError as error:
        logger.exception("%s: %s", f"sftp://me:{QUOTED}@host", error)  # noqa: TRY401 -- it says it twice

    said = capsys.readouterr().err
    assert "Traceback" in said
    assert QUOTED not in said
    assert "canary-of-a-library" not in said
    assert isinstance(StateError("x"), OmniloadError)


def test_a_secret_is_found_behind_whatever_letters_and_beside_a_very_long_word():
    """A search that began at each letter of a word would take hours here."""
    word = "x" * 2_000_000

    assert without_secrets(f"{word} s3://KEY:SECRETSECRET@b {word}") == f"{word} s3://***@b {word}"
    assert "SECRETSECRET" not in without_secrets(f"{'y' * 99}s3://KEY:SECRETSECRET@b")
