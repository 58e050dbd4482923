"""Use of a Ray that the user started."""
