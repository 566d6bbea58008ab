"""Carries a decision out: connections to engines, relay of answers, failover."""
