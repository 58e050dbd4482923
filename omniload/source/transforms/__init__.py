"""From records to samples: the ``transforms`` of a source, applied to batches of records."""
