"""Stores that are asked whether they answer at all, before anything is listed there."""

import threading
from concurrent.futures import FIRST_COMPLETED, wait

import fsspec
import pytest

from omniload.source.stores import asking
from omniload.source.stores.asking import ask_store, silent_stores, store_of

SOURCES = {
    "web": ["s3://user:pw@lake/web/*.parquet", "data/*.parquet"],
    "code": ["s3://lake/code/{0..9}.parquet"],
    "books": ["hdfs://namenode:9000/books"],
    "local": ["books/*.jsonl", "file:///books"],
}


def test_each_store_is_asked_once_and_the_silent_are_told_with_their_sources(monkeypatch):
    release, silent_is_asked, asked = threading.Event(), threading.Event(), []

    def ask(url):
        asked.append(url)
        if url.startswith("s3://"):
            silent_is_asked.set()
            release.wait()
        assert silent_is_asked.wait(60)

    def wait_once_one_has_answered(answers, timeout):
        wait(answers, 60, FIRST_COMPLETED)
        return wait(answers, timeout)

    monkeypatch.setattr(asking, "wait", wait_once_one_has_answered)
    try:
        silent = silent_stores(SOURCES, 0.05, ask)
    finally:
        release.set()

    assert silent == {"s3://lake": ["web", "code"]}
    assert sorted(asked) == ["hdfs://namenode:9000/books", "s3://user:pw@lake/web/*.parquet"]


def test_a_refusal_is_an_answer():
    def refuse(url):
        raise ConnectionRefusedError(url)

    assert silent_stores(SOURCES, 60, refuse) == {}


def test_without_a_store_nobody_is_asked():
    assert silent_stores({"a": ["a.jsonl"]}, 60, pytest.fail) == {}


@pytest.mark.parametrize(
    ("url", "store"),
    [
        ("s3://bucket/a/*.parquet", "s3://bucket"),
        ("hdfs://me:secret@host:9000/a", "hdfs://host:9000"),
        ("https://host", "https://host"),
    ],
)
def test_a_store_is_told_by_scheme_and_host_without_who_asks(url, store):
    assert store_of(url) == store


@pytest.mark.parametrize("url", ["memory://a/b-{0..3}.jsonl", "memory://a/b/*.jsonl", "memory://a"])
def test_a_store_is_asked_for_the_folder_that_a_pattern_begins_with(url):
    store = fsspec.filesystem("memory")
    store.pipe("/a/b/0.jsonl", b"{}")
    try:
        ask_store(url)
        with pytest.raises(FileNotFoundError):
            ask_store("memory://nowhere/b/*.jsonl")
    finally:
        store.store.clear()
        store.pseudo_dirs[:] = [""]
