"""Attention math on plain tensors: no batch, no pool, no layer."""
