"""Lance's options for a store, from the settings of our client."""

import json
from types import SimpleNamespace

import fsspec
import pytest

from omniload.base.errors import ConfigError
from omniload.base.secrets import without_secrets
from omniload.source.parsing.lance_stores import LIMITS, options_for, url_in

KEY = {"key": "AKIAEXAMPLE", "secret": "of-the-store"}
AS_KEY = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "of-the-store"}


@pytest.fixture(autouse=True)
def nothing_set_up(monkeypatch, tmp_path):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)


@pytest.fixture(scope="module", autouse=True)
def models_read_once():
    """Each client of S3 reads a 1 MB JSON description of S3; here all clients are set up from one reading."""
    loaders = pytest.importorskip("botocore.loaders")
    read, found = loaders.JSONFileLoader.load_file, {}

    def load_file(self, path):
        if path not in found:
            found[path] = read(self, path)
        return found[path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders.JSONFileLoader, "load_file", load_file)
        yield


def s3_client(**settings):
    pytest.importorskip("s3fs")
    return fsspec.filesystem("s3", skip_instance_cache=True, **settings)


def told(store):
    return {name: value for name, value in options_for(store).items() if name not in LIMITS}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({**KEY, "token": "t-o-k-e-n"}, {**AS_KEY, "aws_session_token": "t-o-k-e-n"}),
        ({"anon": True}, {"aws_skip_signature": "true"}),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, {"aws_region": "eu-west-1"}),
        ({**KEY, "requester_pays": True}, {**AS_KEY, "aws_request_payer": "true"}),
        (
            {"endpoint_url": "http://minio:9000"},
            {
                "aws_endpoint": "http://minio:9000",
                "allow_http": "true",
                "aws_region": "us-east-1",
            },
        ),
        (
            {"client_kwargs": {"endpoint_url": "https://minio", "region_name": "here"}},
            {"aws_endpoint": "https://minio", "aws_region": "here"},
        ),
        ({"default_block_size": 1 << 20, "config_kwargs": {"read_timeout": 9}}, {}),
        (
            {"use_ssl": False},
            {
                "aws_endpoint": "http://s3.amazonaws.com",
                "allow_http": "true",
                "aws_region": "us-east-1",
            },
        ),
    ],
)
def test_lance_is_told_what_a_client_of_s3_is_set_up_with(settings, expected):
    assert told(s3_client(**settings)) == expected


def test_an_endpoint_or_a_region_of_the_environment_is_the_same_for_both(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert told(s3_client()) == {"aws_region": "eu-west-1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    assert told(s3_client()) == {
        "aws_endpoint": "http://127.0.0.1:9",
        "allow_http": "true",
        "aws_region": "eu-west-1",
    }


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"profile": "mine"}, r"'profile' of s3 cannot be passed"),
        ({"client_kwargs": {"verify": "of-no-one.pem"}}, "'verify' of s3 client_kwargs"),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, "'s3' of s3 config_kwargs"),
        ({"s3_additional_kwargs": {"SSECustomerKey": "of-no-one"}}, "'s3_additional_kwargs'"),
    ],
)
def test_a_setting_that_lance_cannot_be_told_is_refused_by_its_name(settings, named):
    with pytest.raises(ConfigError, match=rf"fsspec's setting {named}.*leave it out") as refused:
        options_for(s3_client(**settings))
    assert "of-no-one" not in str(refused.value)


def gcs_client(**settings):
    return SimpleNamespace(protocol=("gs", "gcs"), storage_options=settings)


def test_lance_is_told_what_a_client_of_gcs_is_set_up_with(tmp_path, monkeypatch):
    path, key = tmp_path / "key.json", {"type": "service_account", "private_key": "of-the-store"}
    path.write_text("{}")

    assert told(gcs_client(project="p")) == told(gcs_client(token="google_default")) == {}
    assert told(gcs_client(token="anon", endpoint_url="http://here:1")) == {
        "google_skip_signature": "true",
        "google_base_url": "http://here:1",
        "allow_http": "true",
    }
    assert told(gcs_client(token=str(path))) == {"google_application_credentials": str(path)}
    assert told(gcs_client(token=key)) == {"google_service_account_key": json.dumps(key)}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "https://there")
    assert told(gcs_client()) == {"google_base_url": "https://there"}
    for settings in ({"token": "browser"}, {"token": {"type": "other"}}, {"requester_pays": True}):
        with pytest.raises(ConfigError, match=r"of gs cannot be passed to Lance"):
            options_for(gcs_client(**settings))


def azure_client(url="https://own.blob.core.windows.net/", **settings):
    names = (
        *("account_name", "account_key", "connection_string", "sas_token"),
        *("client_id", "client_secret", "tenant_id", "anon"),
    )
    return SimpleNamespace(
        protocol=("abfs", "az", "abfss"),
        storage_options=settings,
        service_client=SimpleNamespace(url=url, account_name="own"),
        **dict.fromkeys(names) | settings,
    )


def test_lance_is_told_what_a_client_of_azure_is_set_up_with():
    named = {"azure_storage_account_name": "own"}
    key = {"azure_storage_account_key": "a2V5==", **named}

    assert told(azure_client(account_name="own")) == named
    assert told(azure_client(account_name="own", account_key="a2V5==")) == key
    assert told(azure_client(connection_string="AccountName=own;AccountKey=a2V5==")) == key
    assert told(azure_client(sas_token="?sv=1")) == {"azure_storage_sas_token": "?sv=1", **named}
    assert told(azure_client(anon=True)) == {"azure_skip_signature": "true", **named}
    assert told(azure_client("http://127.0.0.1:10000/own?sig=x", account_key="a2V5==")) == {
        "azure_storage_endpoint": "http://127.0.0.1:10000/own",
        "allow_http": "true",
        **key,
    }
    with pytest.raises(ConfigError, match=r"'credential' of az cannot be passed"):
        options_for(azure_client(credential=object()))


def test_a_store_that_lance_reads_has_its_scheme_and_any_other_is_refused():
    assert url_in(gcs_client(), "bucket/own.lance") == "gs://bucket/own.lance"
    assert url_in(azure_client(), "box/own.lance") == "az://box/own.lance"
    memory = fsspec.filesystem("memory")
    for ask in (options_for, lambda store: url_in(store, "x")):
        with pytest.raises(ConfigError, match=r"Lance does not read a store of memory; .*s3"):
            ask(memory)


def test_secrets_that_lance_is_told_are_in_no_message_from_then_on():
    options_for(s3_client(**KEY))

    assert without_secrets("Error: of-the-store, AKIAEXAMPLE") == "Error: ***, ***"


def test_waits_of_lance_have_limits():
    assert options_for(s3_client()).items() >= LIMITS.items()
