"""What only the kernel can do: calls that Python lacks, locks and processes that end with their holder or parent.

``exec_with_parent`` and ``exec_detached`` are also run as files, by any interpreter: they import
the standard library only.
"""
