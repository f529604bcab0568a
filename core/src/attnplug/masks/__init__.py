"""Masks that position alone does not decide."""
