"""A registry in memory that misbehaves by script: every fault must be reached."""

import base64
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from snapshot.oci.digest import digest_of

__all__ = ["FakeRegistry", "serving"]


class FakeRegistry:
    """Contents, behaviour and received requests of a fake registry."""

    def __init__(self, *, ranges=True, auth=None):
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[bytes, str]] = {}
        self.ranges, self.auth = ranges, auth
        self.faults: list = []
        """Functions of a request's handler; each request for a blob or manifest takes one."""
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.tokens_given = 0
        self.address = ""

    def assert_all_faults_fired(self):
        assert self.faults == []

    def put(self, data):
        self.blobs[digest_of(data)] = data
        return digest_of(data)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: FakeRegistry

    def log_message(self, *_):
        pass

    def answer(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def break_off(self, status, promised, data):
        """Promise more bytes than are sent, then hang up."""
        self.send_response(status)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def allowed(self):
        registry, given = self.registry, self.headers.get("Authorization", "")
        if registry.auth == "basic":
            wanted, challenge = basic("user", "secret"), 'Basic realm="here"'
        elif registry.auth == "bearer":
            wanted = f"Bearer token-{registry.tokens_given}"
            challenge = f'Bearer realm="http://{registry.address}/token",service="fake"'
        else:
            return True
        if given != wanted:
            self.answer(401, b'{"errors": []}', WWW_Authenticate=challenge)
        return given == wanted

    def do_GET(self):
        registry = self.registry
        registry.asked.append((self.command, self.path, dict(self.headers)))
        if self.path.startswith("/token"):
            if self.headers.get("Authorization") != basic("user", "secret"):
                self.answer(401, b"no")
                return
            registry.tokens_given += 1
            self.answer(200, b'{"token": "token-%d"}' % registry.tokens_given)
            return
        if not self.allowed():
            return
        if self.path == "/v2/":
            self.answer(200, b"{}")
            return
        if registry.faults:
            registry.faults.pop(0)(self)
            return
        self.stored()

    do_HEAD = do_GET

    def stored(self):
        kind, name = self.path.split("/")[-2:]
        if kind == "manifests" and name in self.registry.manifests:
            data, media_type = self.registry.manifests[name]
            self.answer(200, data, Content_Type=media_type)
        elif kind == "blobs" and name in self.registry.blobs:
            self.blob(self.registry.blobs[name])
        else:
            self.answer(404, b'{"errors": [{"code": "UNKNOWN"}]}')

    def blob(self, data):
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.registry.ranges:
            self.answer(200, data)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        if first >= len(data):
            self.answer(416)
            return
        said = f"bytes {first}-{last}/{len(data)}"
        self.answer(206, data[first : last + 1], Content_Range=said)


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Ignore clients that hang up, because some tests are about them."""


@contextmanager
def serving(registry):
    """Serve on a free port of this machine; yield ``127.0.0.1:PORT``."""
    handler = type("HandlerOfOne", (Handler,), {"registry": registry})
    server = Server(("127.0.0.1", 0), handler)
    registry.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield registry.address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
