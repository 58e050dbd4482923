"""The binding over libfuse, by pyfuse3."""
