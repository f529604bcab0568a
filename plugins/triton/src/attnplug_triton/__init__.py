"""Attention kernels of our own, in Triton: one source for every CUDA card, and for Triton's interpreter."""
