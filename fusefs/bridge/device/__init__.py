"""The binding over /dev/fuse: the kernel's protocol, spoken by this package itself."""
