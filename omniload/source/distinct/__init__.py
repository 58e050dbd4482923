"""Records that are not drawn again: duplicates of earlier records, and records that another loader has drawn."""
