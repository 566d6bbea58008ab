"""The engines: whether they live, what they report, how they hash."""
