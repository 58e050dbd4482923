"""Servers of HTTP that do less than sources need: what is wrong is said, and a large file is not held."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from omniload.base.errors import ConfigError
from omniload.mix.sources import JsonlSource
from omniload.source.files import reading
from omniload.source.formats.opening import open_format
from omniload.source.patterns import find_files

LINE = b'{"text": "a document"}\n'
SIZES = {"small": len(LINE) * 100, "large": 9 << 20}


class WholeFiles(BaseHTTPRequestHandler):
    """Sends files whole, whatever part is asked for."""

    says_size = True
    sent_bytes = 0

    def do_HEAD(self):
        size = SIZES[self.path.strip("/")]
        self.send_response(200)
        if self.says_size:
            self.send_header("Content-Length", str(size))
        self.end_headers()
        return size

    def do_GET(self):
        left = self.do_HEAD()
        try:
            while left:
                self.wfile.write(part := (LINE * 1000)[:left])
                left -= len(part)
                type(self).sent_bytes += len(part)
        except ConnectionError:
            pass  # whoever asked has seen enough

    def log_message(self, *said):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(**settings):
        kind = type("Kind", (WholeFiles,), settings)
        servers.append(server := ThreadingHTTPServer(("127.0.0.1", 0), kind))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return kind, f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def opened(folder, url):
    return open_format("web", JsonlSource(type="jsonl", path=url, text="text"), base_dir=folder)


@pytest.mark.parametrize("name", SIZES)
def test_a_server_that_gives_no_parts_is_told_as_one(serve, tmp_path, name):
    _, url = serve()

    with pytest.raises(ConfigError, match=r"gives no parts of a file: .* requests for ranges"):
        opened(tmp_path, f"{url}/{name}")


def test_a_large_file_is_not_held_to_find_that_out(serve, tmp_path):
    kind, url = serve()
    (file,) = find_files([f"{url}/large"], tmp_path, source="web")

    with pytest.raises(ConfigError), reading(file):
        file.read_range(0, 512)

    assert kind.sent_bytes < SIZES["large"]


def test_a_stream_that_cannot_go_on_in_a_file_is_told_so(serve, tmp_path):
    _, url = serve()
    (file,) = find_files([f"{url}/large"], tmp_path, source="web")

    def read_on():
        with reading(file), file.open() as stream:
            stream.seek(1000)
            stream.read(1000)

    with pytest.raises(ConfigError, match="gives no parts of a file"):
        read_on()


def test_a_server_that_says_no_size_is_told_as_one(serve, tmp_path):
    _, url = serve(says_size=False)

    with pytest.raises(ConfigError, match=r"its store gives no size; .* a Content-Length"):
        opened(tmp_path, f"{url}/small")
