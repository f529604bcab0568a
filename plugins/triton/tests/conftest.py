"""Without a GPU the kernels run in Triton's interpreter: asked for here, before triton is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The helpers lie beside the tests.
sys.path.insert(0, str(Path(__file__).parent))
