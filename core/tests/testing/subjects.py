"""Subjects of these tests."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.spec import BackendSpec
from attnplug.testing.subject import Subject

from .dense_backend import DENSE, DenseBackend


def dense_subject(kind: type[DenseBackend] = DenseBackend, spec: BackendSpec = DENSE, **options: Any) -> Subject:
    """Return a backend that need not be installed."""
    return Subject(spec.name, spec, lambda env: kind(env, spec), torch.device("cpu"), **options)
