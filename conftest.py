"""Without a GPU, Triton's kernels are interpreted: said before any test module imports triton, which reads it then."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
