"""Dynamic sampling: batches with an exact number of groups whose answers differ in reward."""
