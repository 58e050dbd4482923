"""Stores that Lance reads by itself: converts settings of our client to Lance's, so that both ask the same store.

Like the clients of fsspec, Lance finds unnamed credentials in the environment, in a file of the user, or on the
machine. Settings that a user gives fsspec are passed on. A setting that cannot be passed on is refused, because Lance
would ask another store, or ask it under another identity.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import fsspec

from omniload.base.errors import ConfigError
from omniload.base.secrets import note_secrets_of

__all__ = ["IN_ITS_PLACE", "LIMITS", "SCHEMES", "options_for", "url_in"]

LIMITS = {
    "connect_timeout": "10s",
    "timeout": "30s",
    "client_max_retries": "3",
    "client_retry_timeout": "30",
    "download_retry_count": "1",
}
"""Limits for Lance, which tries six times when it opens a data set.

With them, a server that accepts connections but never answers is reported after 3 minutes. Lance's own limits, with
four tries for each, would take 12 minutes.
"""

_OF_FSSPEC = frozenset(
    {
        *("asynchronous", "loop", "skip_instance_cache", "batch_size"),
        *("use_listings_cache", "listings_expiry_time", "max_paths", "max_concurrency"),
        *("default_block_size", "block_size", "blocksize", "default_fill_cache"),
        *("default_cache_type", "default_location", "fixed_upload_size", "cache_regions"),
        *("timeout", "requests_timeout", "connection_timeout", "read_timeout", "cache_timeout"),
    }
)
"""Settings of fsspec's own reading, which affect neither the store nor the identity."""
_OF_S3_CLIENT = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
}
_AWS = re.compile(r"https://s3[.-]?[a-z0-9.-]*\.amazonaws\.com(\.cn)?/?")


def url_in(store: fsspec.AbstractFileSystem, path: str) -> str:
    """Return the URL with which Lance finds what a client of fsspec finds at ``path``.

    Raises:
        ConfigError: Lance does not read such a store.
    """
    return f"{_known(store)[0]}://{path}"


def options_for(store: fsspec.AbstractFileSystem) -> dict[str, str]:
    """Return Lance's options for a store. Secrets in them are registered, so that no message shows them.

    Raises:
        ConfigError: Lance does not read such a store, or lacks an option for a setting of its client.
        Exception: What the client raises if it has to connect first.
    """
    options = LIMITS | _known(store)[1](store)
    note_secrets_of("", options)
    return options


def _known(
    store: fsspec.AbstractFileSystem,
) -> tuple[str, Callable[[fsspec.AbstractFileSystem], dict[str, str]]]:
    protocols = {store.protocol} if isinstance(store.protocol, str) else {*store.protocol}
    for protocol, known in _STORES.items():
        if protocol in protocols:
            return known
    raise ConfigError(
        f"Lance does not read a store of {' or '.join(sorted(protocols))}; {IN_ITS_PLACE}"
    )


def _s3_options(store: fsspec.AbstractFileSystem) -> dict[str, str]:
    given, client = store.storage_options, store.client_kwargs
    settings = store.config_kwargs
    _require_told(
        "s3",
        given,
        {
            *("anon", "endpoint_url", "key", "secret", "token", "username", "password"),
            *("use_ssl", "client_kwargs", "config_kwargs", "requester_pays"),
        },
    )
    _require_told(
        "s3 client_kwargs", client, {*_OF_S3_CLIENT, "region_name", "endpoint_url", "use_ssl"}
    )
    waits = {"connect_timeout", "read_timeout", "retries", "max_pool_connections"}
    _require_told("s3 config_kwargs", settings, waits)
    found = {
        # s3fs accepts each of them under two names.
        name: getattr(store, attribute) or client.get(name)
        for name, attribute in _OF_S3_CLIENT.items()
    }
    options = {name: value for name, value in found.items() if value}
    # In this case our client signs nothing, whatever keys are set as well.
    if store.anon:
        options = {"aws_skip_signature": "true"}
    if store.requester_pays:
        options["aws_request_payer"] = "true"
    # Taken from the connected client, because the endpoint may come from a variable or a file of the user.
    endpoint, region = store.s3.meta.endpoint_url, store.s3.meta.region_name
    if not _AWS.fullmatch(endpoint):
        options |= _endpoint("aws_endpoint", endpoint) | {"aws_region": region}
    elif named := client.get("region_name") or store.session.get_config_variable("region"):
        # If no region is named, Lance asks Amazon for the bucket's region; the client's region is only a guess.
        options["aws_region"] = named
    return options


def _gcs_options(store: fsspec.AbstractFileSystem) -> dict[str, str]:
    given = store.storage_options
    _require_told(
        "gs",
        given,
        {"token", "endpoint_url", "project", "access", "consistency", "check_connection"},
    )
    token, options = given.get("token"), {}
    if token == "anon":  # noqa: S105
        options["google_skip_signature"] = "true"
    elif isinstance(token, Mapping) and token.get("type") == "service_account":
        options["google_service_account_key"] = json.dumps(dict(token))
    # gcsfs accepts a path, the content of the file, or the name of a method.
    elif isinstance(token, str) and os.path.isfile(token):  # noqa: PTH113
        options["google_application_credentials"] = token
    elif token not in (None, "google_default", "cloud"):
        raise _untold("gs", "token")
    # gcsfs uses this variable, too.
    endpoint = given.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    return options | (_endpoint("google_base_url", endpoint) if endpoint else {})


def _azure_options(store: fsspec.AbstractFileSystem) -> dict[str, str]:
    keys = ("account_key", "sas_token", "client_id", "client_secret", "tenant_id")
    _require_told(
        "az",
        store.storage_options,
        {*keys, "account_name", "connection_string", "anon", "assume_container_exists"},
    )
    # The connection string includes the other settings.
    parts = (part.partition("=") for part in (store.connection_string or "").split(";"))
    named = {name: value for name, _, value in parts}
    account = store.account_name or named.get("AccountName") or store.service_client.account_name
    told = {name: getattr(store, name) for name in keys} | {
        "account_key": store.account_key or named.get("AccountKey"),
        "sas_token": store.sas_token or named.get("SharedAccessSignature"),
    }
    options = {f"azure_storage_{name}": value for name, value in told.items() if value}
    # True by default; credentials take precedence.
    if store.anon and not options:
        options["azure_skip_signature"] = "true"
    # A signature may follow the question mark.
    endpoint = store.service_client.url.partition("?")[0].rstrip("/")
    if endpoint != f"https://{account}.blob.core.windows.net":
        options |= _endpoint("azure_storage_endpoint", endpoint)
    return {"azure_storage_account_name": str(account), **options}


def _endpoint(name: str, url: str) -> dict[str, str]:
    """Return the option for a server; Lance accepts one without TLS only with a second option."""
    plain = {"allow_http": "true"} if url.startswith("http://") else {}
    return {name: url, **plain}


def _require_told(what: str, given: Mapping[str, Any], told: Collection[str]) -> None:
    """Raise an error for a setting that Lance would not know.

    Raises:
        ConfigError: Names the setting, never its value.
    """
    for name, value in given.items():
        if value and name not in told and name not in _OF_FSSPEC:
            raise _untold(what, name)


def _untold(what: str, name: str) -> ConfigError:
    return ConfigError(
        f"fsspec's setting {name!r} of {what} cannot be passed to Lance; set it in the environment or in the files "
        "that clients of this store read, leave it out, or mount the store with omniload fs mount and name the "
        "folder there"
    )


_STORES: Mapping[str, tuple[str, Callable[[fsspec.AbstractFileSystem], dict[str, str]]]] = {
    "s3": ("s3", _s3_options),
    "gs": ("gs", _gcs_options),
    "abfs": ("az", _azure_options),
}
"""For each protocol of fsspec: the scheme of Lance's URL, and the function that makes Lance's options."""
SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Schemes of the URLs of these stores."""
IN_ITS_PLACE = (
    "it reads folders, s3://, gs:// and az://: mount the store with omniload fs mount and name the folder there, or "
    "copy the data set"
)
"""Remedy for any other store."""
