"""What only the kernel can do: calls that Python lacks, locks and processes that end with their holder or parent.

``exec_with_parent`` is also run as a file, by any interpreter: it imports the standard library only.
"""
