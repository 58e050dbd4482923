"""Processes that end while a store delays their reads.

A client of a store waits in Python, below Arrow. A thread that returned from such a wait while the interpreter was
torn down aborted the process: after the error that a user had seen, or after Ctrl-C.
"""

import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

MIX = """\
version: 1
seed: 1
tokenizer: {type: bytes}
sources:
  a: {type: jsonl, path: "http://127.0.0.1:PORT/a.jsonl"}
mix: {stages: [{from_step: 0, weights: {a: 1}}]}
pack: {length: 16}
batch: {tokens: 64, micro_tokens: 64}
runtime: {batch_timeout: LIMIT}
"""
LINES, GIVEN_BYTES = b'{"text": "a"}\n' * 500_000, 4 << 20
"""More lines than a client reads ahead."""
ENDS_SLOWLY = """\
import time
class Held:
    def __del__(self, sleep=time.sleep):
        sleep(1.2)
held = Held()
"""
"""A script whose tear-down lasts as long as one wait of a client, as in a process that has loaded many modules."""
TRAINS = """\
import signal, omniload
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
with omniload.open("mix.yaml", steps=1, arrays="numpy") as loader:
    list(loader)
"""
WAITS = """\
import sys, omniload
with omniload.open("mix.yaml", steps=1, arrays="numpy") as loader:
    loader.start()
    sys.stdin.readline()
    list(loader)
"""
"""A script that makes the store receive the request before it waits for a batch.

Opening has a limit too, and takes some seconds on a busy machine.
"""
LEAVES = """\
import sys, threading, omniload
kept = []
given = {"steps": 1, "arrays": "numpy"}
threading.Thread(target=lambda: kept.append(omniload.open("mix.yaml", **given)), daemon=True).start()
sys.stdin.readline()
sys.exit(7)
"""
"""A script that ends without closing its loader."""


@pytest.fixture
def store():
    """A server that holds back the end of a file; ``asked`` is set once that part is requested."""
    asked, over = threading.Event(), threading.Event()

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(200, len(LINES))

        def do_GET(self):
            start, stop = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            if start >= GIVEN_BYTES:
                asked.set()
                over.wait(600)
                return
            data = LINES[start : stop + 1]
            self.answer(206, len(data))
            self.wfile.write(data)

        def answer(self, status, size):
            self.send_response(status)
            self.send_header("Content-Length", str(size))
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.asked = asked
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        over.set()
        server.shutdown()
        serving.join()


@pytest.mark.parametrize(
    ("script", "limit", "sends", "code", "says"),
    [
        (
            WAITS,
            "10s",
            "\n",
            1,
            r"UnavailableError: rank dp=0 waited \d+ s for the batch of step 0",
        ),
        (TRAINS, "10m", signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        (LEAVES, "10m", "\n", 7, ""),
    ],
    ids=["limit", "interrupt", "exit"],
)
def test_a_process_ends_soon_and_in_order_while_a_store_holds_back_what_it_reads(
    tmp_path, store, script, limit, sends, code, says
):
    mix = MIX.replace("PORT", str(store.server_port)).replace("LIMIT", limit)
    (tmp_path / "mix.yaml").write_text(mix)
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_SLOWLY + script],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert store.asked.wait(60)
            if isinstance(sends, signal.Signals):
                process.send_signal(sends)
            said, _ = process.communicate(sends if isinstance(sends, str) else None, timeout=60)
        finally:
            process.kill()

    assert "Fatal Python error" not in said
    assert "Exception ignored" not in said
    assert process.returncode == code, said
    assert re.search(says, said), said
    # If threads do not end, closing waits ten seconds and reports it.
    assert "closed while a call does not end" not in said
