"""The same kernels in Triton's interpreter, on a CPU: for debugging, and for machines without a GPU to test on.

``TRITON_INTERPRET=1`` must be set before triton is imported. A captured graph records no interpreted kernel, so no
graph level is declared; everything else is as on a GPU.
"""

from __future__ import annotations

from attnplug.assembly.env import BackendEnv
from attnplug.errors import BackendLoadError
from attnplug.modes import GraphLevel

from .backend import TritonBackend
from .kernels.version import INTERPRETED
from .options import TritonOptions
from .spec import SPEC

INTERPRETED_SPEC = SPEC.replace(
    device_types=frozenset({"cpu"}), compute_capability=(None, None), graph_level=GraphLevel.NONE
)


def interpreted_backend(env: BackendEnv, options: TritonOptions | None = None) -> TritonBackend:
    """Build the backend over CPU tensors.

    Raises:
        BackendLoadError: Triton was imported without its interpreter.
    """
    if not INTERPRETED:
        raise BackendLoadError(
            "triton was imported without its interpreter, and compiled kernels do not run on a CPU",
            remedy="set TRITON_INTERPRET=1 before the process starts",
        )
    return TritonBackend(env, options, spec=INTERPRETED_SPEC)
