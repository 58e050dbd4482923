"""The tree of inodes: what of it is open, however deep it is."""

import sys

from fusefs.vfs.inode_table import ROOT, InodeTable, open_below

OPEN = object()


def test_what_is_open_is_found_at_any_depth_in_the_order_of_names():
    tree = InodeTable()
    root = node = tree.node(ROOT)
    for _ in range(sys.getrecursionlimit() + 10):
        node = tree.child(node, "d")
        node.lookups = 1
    first, second = tree.child(node, "f"), tree.child(node, "g")
    first.body = second.body = OPEN
    top = tree.child(root, "h")
    top.body = OPEN

    assert list(open_below(root)) == [first, second, top]
