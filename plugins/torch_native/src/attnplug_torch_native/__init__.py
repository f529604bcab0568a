"""Attention in plain PyTorch: the complete reference backend."""
