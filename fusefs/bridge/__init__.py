"""The layer between the kernel and a file system: neutral handlers, and the bindings that speak FUSE."""
