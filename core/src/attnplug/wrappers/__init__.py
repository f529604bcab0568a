"""Backends made of backends."""
