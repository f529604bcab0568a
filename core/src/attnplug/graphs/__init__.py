"""Captured steps: buffers of fixed address, runners, and a graph that a CPU can run."""
