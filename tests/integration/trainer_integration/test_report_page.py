"""The report in a real browser: what it draws, at 400 pixels too, and what it says under the pointer."""

import json
import queue
import shutil
import subprocess
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from tests.support.plane.builders import a_mix
from tests.support.trainer.run_lines import a_memory, a_run_folder, a_step, an_event
from trainer_integration.report.report import REPORT_NAME, ReportProcess, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIMIT_S = 120
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
QUIET = ("--disable-background-networking", "--disable-component-update", "--hide-scrollbars")

PROBE = """
<script>
addEventListener("error", (event) => (window.faults = [...(window.faults || []), event.message]));
const probe = () => {
  if (document.querySelectorAll(".plot path.line").length < 11) return setTimeout(probe, 20);
  const texts = (box) => [...box.querySelectorAll("text")].map((text) => [text, text.getBoundingClientRect()]);
  const overlap = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const found = { faults: window.faults || [], overlaps: [], outside: [], charts: 0 };
  for (const box of document.querySelectorAll(".plot")) {
    const path = box.querySelector("path.line");
    found.charts += path !== null && path.getAttribute("d").length > 10;
    const all = texts(box);
    all.forEach(([one, a], i) => {
      if (a.left < -1 || a.right > innerWidth + 1) found.outside.push(one.textContent);
      for (const [other, b] of all.slice(i + 1)) {
        if (overlap(a, b)) found.overlaps.push([box.id, one.textContent, other.textContent]);
      }
    });
  }
  found.wider = document.documentElement.scrollWidth - innerWidth;
  found.flags = [...document.querySelectorAll("#plot-loss .flag")].map((flag) => flag.textContent);
  const svg = document.querySelector("#plot-loss svg"), place = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: place.left + 58, clientY: place.top + 90 }));
  found.tip = document.querySelector("#plot-loss .tip").innerText;
  document.querySelector("[data-axis=tokens]").click();
  found.axis = [...document.querySelectorAll("#plot-loss text")].at(-5).textContent && location.hash;
  const link = document.querySelector("[data-file=csv]");
  link.addEventListener("click", (event) => event.preventDefault());
  window.Blob = class { constructor(parts) { found.csv = parts.join("").split("\\n").slice(0, 2); } };
  URL.createObjectURL = () => "#";
  link.click();
  fetch("/told", { method: "POST", body: JSON.stringify(found) });
};
addEventListener("load", probe);
</script>
"""


FRAME = '<body style="margin:0"><iframe src="page.html" style="width:{}px;height:3000px;border:0">'


class Pages(SimpleHTTPRequestHandler):
    """Hands out the pages of a folder, and keeps what a page tells of itself."""

    def do_POST(self):
        told = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.server.told.put(json.loads(told))

    def log_message(self, *_):
        pass


def seen_by_a_browser(folder, page):
    """Open a page of a folder in a browser; return what it tells of itself."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=folder))
    server.told = queue.Queue()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = subprocess.Popen(
        [
            *(CHROMIUM, *FLAGS, *QUIET, f"--user-data-dir={folder / 'profile'}"),
            *("--window-size=1300,3000", f"http://127.0.0.1:{server.server_port}/{page}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return server.told.get(timeout=LIMIT_S)
    finally:
        browser.terminate()
        browser.wait(LIMIT_S)
        server.shutdown()
        server.server_close()


def lines_with_restarts():
    """Return a run of 80 steps that was killed six times, thrice within a few steps."""
    lines, step, attempt = [an_event("start", "2 ranks")], 0, 0
    kills = [20, 21, 22, 40, 60, 79]
    while step < 80:
        held_out = {"web": 9 - step / 20, "code": 8.5} if step % 15 == 9 else None
        rate = 1e-3 * min(1, step / 10)
        lines.append(a_step(step, attempt=attempt, lr=rate, evaluation=held_out))
        step += 1
        if kills and step == kills[0]:
            kills.pop(0)
            attempt += 1
            lines += [
                an_event("exit", "rank 1: signal SIGKILL"),
                an_event("restart", attempt=attempt),
                an_event("resume", attempt=attempt, step=step - 2),
            ]
            step -= 2
    return [*lines, a_memory(5.0, rank_0=1 << 28), a_memory(10.0, rank_0=1 << 29)]


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_draws_fits_and_answers_the_pointer(tmp_path, width):
    if CHROMIUM is None:
        pytest.skip("NOT TESTED: no chromium is installed (Debian package chromium)")
    run = a_run_folder(tmp_path, a_mix(weights={"web": 3, "code": 2}), lines_with_restarts())
    page = write_report(run).read_text().replace("<head>", "<head>" + PROBE)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    # A window has a least width: a narrow one is a frame.
    (tmp_path / "frame.html").write_text(FRAME.format(width), encoding="utf-8")

    found = seen_by_a_browser(tmp_path, "frame.html")

    assert (found["faults"], found["overlaps"], found["outside"]) == ([], [], [])
    assert found["charts"] == 13
    assert found["wider"] <= 0
    assert found["flags"][0] == "1\u20133"
    assert found["tip"].splitlines() == ["step 0", "Loss, nats per token 9"]
    assert found["axis"] == "#x=tokens"
    assert found["csv"][0].startswith('run,"step","tokens_so_far","seconds_so_far",')
    assert found["csv"][1].startswith(f'"{run.parent.name}/run",0,1000,1,')


def test_a_report_beside_a_rank_is_written_by_another_process_that_ends_with_the_rank(tmp_path):
    run = a_run_folder(tmp_path, a_mix(), [an_event("start"), a_step(0, loss=7.0)])
    page = run / REPORT_NAME

    with ReportProcess(least_s=0.1) as report:
        before = set(psutil.Process().children())  # of other tests, a resource tracker of theirs
        report.start(run)
        (child,) = set(psutil.Process().children()) - before
        ends_s = time.monotonic() + LIMIT_S
        while not page.exists():
            assert time.monotonic() < ends_s, "no report was written"
            assert child.is_running(), "what writes reports has ended"
            threading.Event().wait(0.05)
        assert "Running; this page reads itself again" in page.read_text()
        assert child.nice() >= 10

    assert not child.is_running()
