"""Ports of tests: no two the same, and none that the kernel gives to somebody else meanwhile."""

from pathlib import Path

from tests.support.ports import free_ports


def test_ports_differ_and_lie_where_the_kernel_chooses_none_for_a_connection():
    found = free_ports(50)

    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert len(set(found)) == 50
    # Where the kernel chooses almost anywhere, there is no such place.
    assert min(found) >= 20_000
    assert max(found) < first or first <= 25_000
