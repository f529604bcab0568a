"""Backends that are wrong in one thing each: what the conformance suite must catch, and name."""
