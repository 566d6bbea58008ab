"""The HTTP surface: an explicit list of routes; no other path reaches an engine."""
