"""Triton kernels and their launchers. A kernel knows tensors and lengths, and no batch."""
