"""Attention kernels as plugins for LLM serving."""
