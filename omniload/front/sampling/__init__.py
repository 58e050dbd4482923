"""Dynamic sampling: batches of exactly so many groups whose answers differ in reward."""
