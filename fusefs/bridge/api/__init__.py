"""The interface of a file system to a binding, and the futures that a handler may wait for."""
