"""A forked process does not end clients whose threads it lacks. The client is the real one; it never connects."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("hdfs_native")
LIMIT_S = 60
"""Limit for a process that starts and forks; a process that waits for missing threads would wait for ever."""
FORKS = {
    "between fork and exec": "subprocess.run(['true'], preexec_fn=lambda: None, check=True)",
    "a copy that ends in order": """
        if (copy := os.fork()) == 0:
            client = holder = None
            sys.exit(0)
        assert os.waitpid(copy, 0)[1] == 0
    """,
}
CLIENTS = {
    "of fsspec's cache": "fsspec.filesystem('hdfs', host='127.0.0.1', port=1)",
    "of a store of ours": "holder = native_hdfs_store('hdfs+native://127.0.0.1:1/')",
}


@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_a_process_forks_while_a_client_of_hdfs_is_there(client: str, fork: str) -> None:
    script = "\n".join(
        (
            "import os, subprocess, sys",
            "import fsspec",
            "from fusefs.stores.remote.native_hdfs import native_hdfs_store",
            client,
            textwrap.dedent(fork),
        )
    )
    subprocess.run([sys.executable, "-c", script], timeout=LIMIT_S, check=True)


def test_a_process_forks_while_another_of_its_threads_does() -> None:
    script = """
        import os, subprocess, threading
        import fsspec, hdfs_native.fsspec

        forking = threading.Lock()

        def fork_beside():
            if forking.acquire(blocking=False):
                run = dict(args=["true"], preexec_fn=lambda: None, check=True)
                thread = threading.Thread(target=subprocess.run, kwargs=run)
                thread.start()
                thread.join()

        # What is registered later is called before: clients are held, and no lock of Python's own is.
        os.register_at_fork(before=fork_beside)
        import omniload.base.concurrency.forks

        fsspec.filesystem("hdfs", host="127.0.0.1", port=1)
        if (copy := os.fork()) == 0:
            os._exit(0)
        assert os.waitpid(copy, 0)[1] == 0
        assert forking.locked(), "no thread forked"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=LIMIT_S, check=True)


def test_what_a_fork_held_is_let_go_of_in_the_parent() -> None:
    script = """
        import os, sys, weakref
        from omniload.base.concurrency.forks import never_ended_by_a_fork
        class Client: pass
        client = Client()
        never_ended_by_a_fork(client)
        seen = weakref.ref(client)
        if (copy := os.fork()) == 0:
            client = None
            os._exit(seen() is None)
        client = None
        assert os.waitpid(copy, 0)[1] == 0, "the copy let go of it"
        assert seen() is None, "the parent did not"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=LIMIT_S, check=True)
