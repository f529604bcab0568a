"""Which Triton is installed, and whether it compiles kernels or interprets them."""

from __future__ import annotations

import triton

VERSION: tuple[int, ...] = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])
INTERPRETED = VERSION >= (3, 6) and bool(triton.knobs.runtime.interpret)
"""Whether this process runs kernels in Triton's interpreter, on the CPU: decided when triton was imported."""
PROVEN_GLUON = (3, 6)
"""The version that the Gluon kernels were run with: Gluon's names change between versions."""
