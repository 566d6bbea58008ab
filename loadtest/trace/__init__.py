"""Readers of recorded traffic."""
