"""Where this machine's tests run: on its GPU, else in the interpreter."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = 4e-3 if DEVICE == "cuda" else 8e-3
"""Largest relative error in bfloat16: operands carry 8 bits. The interpreter truncates where a GPU rounds."""
LSE = 2e-3
"""Largest distance of an LSE: products of half types accumulate in float32."""
