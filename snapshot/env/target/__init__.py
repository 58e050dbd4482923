"""The directories of one environment: scanned, changed, recorded, brought back."""
