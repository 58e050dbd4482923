"""A store of files over HTTP, in its own process, that refuses requests or is slow for a while on command.

python -m benchmarks.faults.ailing_store --help
"""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Self

import click
from typing_extensions import override

from omniload.base.linux.exec_with_parent import end_with_parent

__all__ = ["AilingStore", "main"]

_TIMES_SLOWER = 10
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")


class AilingStore:
    """Serves a folder while its ``with`` block runs."""

    def __init__(self, folder: Path, answers_after_s: float, address: str = "127.0.0.1") -> None:
        """Serve ``folder``; each answer takes ``answers_after_s`` seconds if the store is healthy."""
        self._folder, self._answers_after_s, self._address = folder, answers_after_s, address

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.faults.ailing_store"),
                *("--folder", str(self._folder), "--answers-after", str(self._answers_after_s)),
                *("--address", self._address),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self._heard()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.communicate()

    def ail(self, kind: str, seconds: float) -> None:
        """Refuse requests (``store``) or be ten times slower (``delay``) for the next ``seconds`` seconds."""
        self._ask(f"{kind} {seconds}")

    def counts(self) -> dict[str, int]:
        """Return the numbers of requests that were answered properly, were refused, and were slow, so far."""
        counts: dict[str, int] = json.loads(self._ask("counts"))
        return counts

    def _ask(self, line: str) -> str:
        assert self._server.stdin is not None, "it is a pipe"
        self._server.stdin.write(f"{line}\n")
        self._server.stdin.flush()
        return self._heard()

    def _heard(self) -> str:
        assert self._server.stdout is not None, "it is a pipe"
        if not (line := self._server.stdout.readline()):
            raise RuntimeError(f"the store of {self._folder} has ended; look at what it said")
        return line.strip()


class _Ailment:
    """The present fault of a store, its end, and the number of requests that it affected. Safe for any thread."""

    def __init__(self, answers_after_s: float) -> None:
        self._answers_after_s = answers_after_s
        self._lock = threading.Lock()
        self._until_s = {"store": 0.0, "delay": 0.0}
        self._counts = dict.fromkeys(("answered", "refused", "slow"), 0)

    def begin(self, kind: str, seconds: float) -> None:
        with self._lock:
            self._until_s[kind] = time.monotonic() + seconds

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def meet(self) -> int | None:
        """Wait for the time of an answer; return the number of a refusal, or ``None`` to answer."""
        now_s = time.monotonic()
        with self._lock:
            is_refused, is_slow = (now_s < self._until_s[kind] for kind in ("store", "delay"))
            self._counts["refused" if is_refused else "answered"] += 1
            self._counts["slow"] += is_slow
            number = self._counts["refused"] if is_refused else None
        time.sleep(self._answers_after_s * (_TIMES_SLOWER if is_slow else 1))
        return number


class _Files(SimpleHTTPRequestHandler):
    """Serves files whole or in parts, with a tag each, and folders as lists of links."""

    protocol_version = "HTTP/1.1"
    ailment: ClassVar[_Ailment]

    @override
    def do_HEAD(self) -> None:
        self._answer(sends=False)

    @override
    def do_GET(self) -> None:
        self._answer(sends=True)

    def _answer(self, *, sends: bool) -> None:
        refusal, path = self.ailment.meet(), Path(self.translate_path(self.path))
        # The refusals alternate between those of stores that are down: an error, silence, and the beginning of an
        # answer.
        way = None if refusal is None else ("error", "silence", "beginning")[refusal % 3]
        if way == "error":
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "as it was told")
        elif way == "silence" or (way == "beginning" and not (sends and path.is_file())):
            self.close_connection = True
        elif path.is_file():
            self._send(path, sends=sends, stops_early=way == "beginning")
        elif sends:
            super().do_GET()
        else:
            super().do_HEAD()

    def _send(self, path: Path, *, sends: bool, stops_early: bool) -> None:
        status = path.stat()
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, last = map(int, asked.groups()) if asked else (0, status.st_size - 1)
        stop = min(last + 1, status.st_size)
        self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{status.st_size}")
        self.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
        self.end_headers()
        if sends:
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read((stop - start) // 2 if stops_early else stop - start))
        if stops_early:
            self.close_connection = True

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Write no log: faults are counted instead."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    """Queue of connections. The processes of a job open more at once than the default of five, and some would hang."""

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that has gone, because it was killed in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--folder",
    required=True,
    type=click.Path(exists=True, file_okay=False),
    help="Folder to serve.",
)
@click.option("--answers-after", "answers_after_s", default=0.0, help="Seconds for an answer.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to listen on.")
def main(folder: str, answers_after_s: float, address: str) -> None:
    """Serve a folder over HTTP until standard input ends; the lines of standard input start faults.

    \b
    Example:
      echo "store 20" | python -m benchmarks.faults.ailing_store --folder corpus
    """  # noqa: D301 -- click's own marker
    end_with_parent(signal.SIGKILL)
    _Files.ailment = ailment = _Ailment(answers_after_s)
    with _Server((address, 0), partial(_Files, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"http://{address}:{server.server_port}", flush=True)
        for line in sys.stdin:
            kind, _, seconds = line.strip().partition(" ")
            if kind != "counts":
                ailment.begin(kind, float(seconds))
            print(json.dumps(ailment.counts()), flush=True)


if __name__ == "__main__":
    main()
