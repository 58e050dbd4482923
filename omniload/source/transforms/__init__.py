"""Records to samples: what a source's ``transforms`` do to whole batches of them."""
