from __future__ import annotations
from .axis import Axis, Check
from . import a_semantics

AXES = {"A": a_semantics.AXIS}


def find_check(axis, check):
    return AXES[axis].checks[check]
