"""The binding over libfuse, by pyfuse3 and trio."""
