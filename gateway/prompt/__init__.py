"""The way from a body to the hashes of its prefix blocks; no I/O."""
