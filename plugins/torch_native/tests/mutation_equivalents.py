"""Mutants that no case can tell from the original, each with the reason: sizes, guards, what a CPU does not show."""

from __future__ import annotations

import json
from pathlib import Path

_REASONS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

EQUIVALENT: dict[str, str] = {one: reason for reason, ids in _REASONS.items() for one in ids}
"""Id of a mutant → why it is one program with the original, as far as the contract and this machine show."""
