"""HTTP servers that do less than sources need: the fault is named, and a large file is not kept in memory."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.mix.sources import JsonlSource
from omniload.source.files import beside, reading
from omniload.source.formats.opening import open_format
from omniload.source.patterns import find_files
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.shard_caches import a_cache

LINE = b'{"text": "a document"}\n'
SIZES = {"small": len(LINE) * 100, "large": 9 << 20}


class WholeFiles(BaseHTTPRequestHandler):
    """Sends files whole, whatever part is requested."""

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
            pass  # the client has seen enough

    def log_message(self, *said):
        pass


class Ailing(WholeFiles):
    """Answers with an error once an error is set."""

    status = 200

    def do_HEAD(self):
        if self.status == 200:
            return super().do_HEAD()
        self.send_response(self.status)
        self.end_headers()
        return 0


class Dated(WholeFiles):
    """Sends parts, without tags, with the time of writing."""

    content, written, gave = LINE * 100, "Fri, 02 Jan 2026 11:58:00 GMT", 0

    def do_HEAD(self):
        self.answer(200, self.content, sends=False)

    def do_GET(self):
        start, stop = self.headers["Range"].removeprefix("bytes=").split("-")
        type(self).gave += 1
        self.answer(206, self.content[int(start) : int(stop) + 1], sends=True)

    def answer(self, status, data, *, sends):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", self.written)
        self.end_headers()
        if sends:
            self.wfile.write(data)


@pytest.fixture
def serve():
    servers = []

    def start(base=WholeFiles, **settings):
        kind = type("Kind", (base,), settings)
        servers.append(server := ThreadingHTTPServer(("127.0.0.1", 0), kind))
        kind.server_now = server
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return kind, f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def opened(folder, url):
    return open_format(
        SourceSpec("web", JsonlSource(type="jsonl", path=url, text="text"), base_dir=folder)
    )


@pytest.mark.parametrize("name", SIZES)
def test_a_server_that_gives_no_parts_is_told_as_one(serve, tmp_path, name):
    _, url = serve()

    with pytest.raises(ConfigError, match=r"does not send parts of a file: .* requests for ranges"):
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

    with pytest.raises(ConfigError, match="does not send parts of a file"):
        read_on()


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_has_too_much_to_do_has_lost_no_file(serve, tmp_path, status):
    kind, url = serve(Ailing)
    (file,) = find_files([f"{url}/small"], tmp_path, source="web")
    kind.status = status

    with pytest.raises(UnavailableError, match=rf"small: cannot be looked at: {status}, "):
        file.require_unchanged()
    with pytest.raises(UnavailableError, match=rf"cannot be listed: {status}, .*; try again"):
        find_files([f"{url}/small"], tmp_path, source="web")


@pytest.mark.parametrize(
    ("name", "read"),
    [("small", lambda file: file.open()), ("large", lambda file: file.read_ranges([(1, 2)]))],
)
def test_a_server_that_has_too_much_to_do_as_a_file_is_opened_has_given_no_corrupt_one(
    serve, tmp_path, name, read
):
    kind, url = serve(Ailing)
    (file,) = find_files([f"{url}/{name}"], tmp_path, source="web")

    def read_meanwhile():
        kind.status = 503
        try:
            read(file)
        finally:
            kind.status = 200  # at the next look it works again

    with pytest.raises(UnavailableError, match=f"{name}: cannot be read: 503, "), reading(file):
        read_meanwhile()


def test_a_server_that_starts_anew_has_lost_no_file(serve, tmp_path):
    kind, url = serve()
    (file,) = find_files([f"{url}/small"], tmp_path, source="web")
    kind.server_now.shutdown()
    kind.server_now.server_close()

    with pytest.raises(UnavailableError, match=r"small: cannot be looked at: .*; try again"):
        file.require_unchanged()


def test_a_file_that_a_server_does_not_have_any_more_is_gone(serve, tmp_path):
    kind, url = serve(Ailing)
    (file,) = find_files([f"{url}/small"], tmp_path, source="web")
    kind.status = 404

    with pytest.raises(IntegrityError, match="gone since the source was opened"):
        file.require_unchanged()


def test_a_file_that_a_list_names_may_be_refused_where_it_is_not_there(serve, tmp_path):
    # S3 over HTTP gives this answer about missing files to clients that may not list, and the name of a compressed
    # shard is tried first.
    kind, url = serve(Ailing)
    (file,) = find_files([f"{url}/small"], tmp_path, source="web")
    kind.status = 403

    with pytest.raises(IntegrityError, match="names large, which is not there"):
        beside(file, "large")


def test_a_server_that_says_no_size_is_told_as_one(serve, tmp_path):
    _, url = serve(says_size=False)

    with pytest.raises(ConfigError, match=r"its store gives no size; .* a Content-Length"):
        opened(tmp_path, f"{url}/small")


def test_a_file_of_a_server_without_tags_is_kept_by_its_time_and_refused_once_it_is_replaced(
    serve, tmp_path
):
    kind, url = serve(Dated)

    def found():
        (file,) = a_cache(tmp_path / "near").through(
            find_files([f"{url}/small"], tmp_path, source="web")
        )
        return file

    assert found().read_range(0, 2000) == kind.content[:2000]
    file = found()
    asked = kind.gave
    assert file.read_range(0, 2000) == kind.content[:2000]
    assert kind.gave == asked

    kind.content, kind.written = kind.content.upper(), "Fri, 02 Jan 2026 11:58:09 GMT"
    with pytest.raises(IntegrityError, match="changed since the source was opened"):
        file.require_unchanged()
    assert found().read_range(0, 2000) == kind.content[:2000]
