"""Metrics and logging."""

import io
import logging
import sys
from unittest.mock import Mock

from prometheus_client import generate_latest

from omniload.base import metrics
from omniload.base.log import ONCE, get_logger, set_up_logging
from omniload.base.secrets import note_secret
from snapshot.env.store.progress import shown_progress


def test_every_metric_opens_with_the_projects_name_and_ends_in_its_unit():
    names = [family.name for family in metrics.REGISTRY.collect()]

    assert names
    assert [n for n in names if not n.startswith("omniload_")] == []
    units = {"planned", "skipped", "ratio", "seconds", "bytes"}
    units |= {"groups", "requests", "hits", "misses", "evictions", "errors", "retries", "calls"}
    assert [n for n in names if n.split("_")[-1] not in units] == []


def test_counting_shows_in_what_a_scrape_reads():
    before = metrics.REGISTRY.get_sample_value("omniload_samples_skipped_total", {"source": "x"})

    metrics.SAMPLES_SKIPPED.labels("x").inc(3)

    after = metrics.REGISTRY.get_sample_value("omniload_samples_skipped_total", {"source": "x"})
    assert after - (before or 0) == 3
    assert b'omniload_samples_skipped_total{source="x"}' in generate_latest(metrics.REGISTRY)


def test_metrics_are_served_on_loopback_unless_told_otherwise(monkeypatch):
    served = []
    monkeypatch.setattr(
        metrics,
        "start_http_server",
        lambda port, **options: (served.append((port, options)), None),
    )

    metrics.serve(9100)

    assert served == [(9100, {"addr": "127.0.0.1", "registry": metrics.REGISTRY})]


def test_closing_ends_the_server_and_frees_its_port(monkeypatch):
    server, thread = Mock(), Mock()
    monkeypatch.setattr(metrics, "start_http_server", lambda port, **options: (server, thread))

    metrics.serve(9100)()

    assert [call[0] for call in server.method_calls] == ["shutdown", "server_close"]
    thread.join.assert_called_once_with()


def test_loggers_hang_under_the_projects_own():
    assert get_logger("omniload.mix.order").name == "omniload.mix.order"
    assert get_logger("snapshot.env").name == "omniload.snapshot.env"


def test_lines_tell_level_role_and_module(monkeypatch, project_logger):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)

    set_up_logging("WARNING", role="rank 1")
    get_logger("omniload.test").info("not shown")
    get_logger("omniload.test").warning("source %s: %d records", "web", 3)

    assert out.getvalue().endswith("WARNING rank 1 omniload.test: source web: 3 records\n")
    assert out.getvalue().count("\n") == 1


def test_what_is_said_once_is_not_said_again_by_the_same_words(monkeypatch, project_logger):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    set_up_logging()
    logger = get_logger("omniload.test")

    for name in ("web", "web", "code"):
        logger.warning("%s has a bad record", name, extra=ONCE)
        logger.warning("%s is slow", name)

    said = [line.partition("omniload.test: ")[2] for line in out.getvalue().splitlines()]
    web, slow = "web has a bad record", "web is slow"
    assert said == [web, slow, slow, "code has a bad record", "code is slow"]


def test_setting_up_twice_writes_every_line_once(monkeypatch, project_logger):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)

    set_up_logging()
    set_up_logging()
    get_logger("omniload.test").info("hello")

    assert out.getvalue().count("hello") == 1


def test_a_process_without_standard_error_logs_nothing_and_goes_on(monkeypatch, project_logger):
    monkeypatch.setattr(sys, "stderr", None)  # as Python sets it if descriptor 2 is closed

    set_up_logging()
    get_logger("omniload.test").warning("hello")

    with shown_progress() as advance:
        advance("packing", 1, 2)


def test_the_root_logger_is_left_alone(project_logger):
    root = logging.getLogger()
    before = root.handlers[:], root.level

    set_up_logging("DEBUG")

    assert (root.handlers, root.level) == before
    assert not project_logger.propagate


def test_handlers_of_the_program_get_no_secret_in_a_line_or_its_traceback():
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)  # like a handler for JSON, whose formatter is not ours
    logger = get_logger("a_store")
    logging.getLogger("omniload").addHandler(handler)
    note_secret("hush-hush-hush")
    try:
        raise OSError("no s3://ID:SECRETSECRET@bucket/x")  # noqa: TRY301
    except OSError:
        logger.exception("asked %s with %s", "s3://ID:SECRETSECRET@bucket/x", "hush-hush-hush")
    finally:
        logging.getLogger("omniload").removeHandler(handler)

    text = shown.getvalue()
    assert "asked s3://***@bucket/x with ***" in text
    assert "OSError: no s3://***@bucket/x" in text
    assert "SECRETSECRET" not in text
    assert "hush" not in text


def test_a_line_with_too_few_arguments_is_left_to_its_handlers():
    record = logging.LogRecord("omniload.x", logging.INFO, "", 0, "asked %s of %s", ("one",), None)

    assert get_logger("a_store").filter(record)
