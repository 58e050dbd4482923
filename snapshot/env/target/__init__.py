"""The directories of one environment: scanned, changed, recorded, restored."""
