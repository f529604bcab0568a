"""Tests of what spans the distributions."""
