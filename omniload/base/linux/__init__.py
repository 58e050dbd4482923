"""Functions that only the kernel can provide: calls that Python lacks, and locks and processes that end with an owner.

``exec_with_parent`` is also run as a file, by any interpreter, so it imports only the standard library.
"""
