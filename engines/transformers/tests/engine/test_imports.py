from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_is_light():
    code = (
        "import sys, attnplug_transformers as a; print(sorted({'torch', 'transformers', 'pydantic'} & {*sys.modules}))"
        "; print(a.SamplingParams.__name__, a.RequestRefused.__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["[]", "SamplingParams RequestRefused"]
