"""A store in a local directory: paths that no link leads out of, and when names become durable."""
