"""Our loaders inside training frameworks: one module per framework, imported by name."""
