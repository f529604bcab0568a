"""The axes of the suite, one file an axis: what each asks, and how it is judged."""

from __future__ import annotations

from . import (
    a_semantics,
    b_sensitivity,
    c_modes,
    d_graphs,
    e_ordering,
    f_id_spaces,
    h_precision,
    i_widths,
    j_refusal,
    k_heterogeneity,
    l_contract,
    p_properties,
)
from .axis import Axis, Check

__all__ = ["AXES", "Axis", "Check", "find_check"]

AXES: dict[str, Axis] = {
    axis.letter: axis
    for axis in (
        a_semantics.AXIS,
        b_sensitivity.AXIS,
        c_modes.AXIS,
        d_graphs.AXIS,
        e_ordering.AXIS,
        f_id_spaces.AXIS,
        h_precision.AXIS,
        i_widths.AXIS,
        j_refusal.AXIS,
        k_heterogeneity.AXIS,
        l_contract.AXIS,
        p_properties.AXIS,
    )
}
"""Letter → axis, in the order they run."""


def find_check(axis: str, check: str) -> Check:
    """Return a check; raises ConfigError with the ones there are."""
    from ...errors import ConfigError

    if axis not in AXES or check not in AXES[axis].checks:
        allowed = ", ".join(f"{one.letter}:{name}" for one in AXES.values() for name in one.checks)
        raise ConfigError(
            f"there is no check {axis}:{check}",
            key="case",
            value=f"{axis}:{check}",
            allowed=allowed,
            remedy="copy an id whole",
        )
    return AXES[axis].checks[check]
