"""The binding over libfuse, through pyfuse3."""
