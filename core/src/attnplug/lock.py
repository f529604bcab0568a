"""A decision in a file: one rank resolves, the others load it and refuse to run with other distributions."""

from __future__ import annotations

import os
from pathlib import Path

from ._metadata import canonical_name
from .catalog import Catalog
from .decision import Candidate, Decision
from .errors import AttnplugError, BackendIncompatible, ConfigError
from .spec import CONTRACT


def write_lock(decision: Decision, path: str | os.PathLike[str]) -> None:
    """Write a decision to a file, whole or not at all: a rank that polls for it never reads half."""
    target = Path(path)
    # Not of tempfile, whose files no other user may read: ranks need not run as one.
    draft = target.with_name(f".{target.name}.{os.getpid()}") if target.name else target
    try:
        try:
            draft.write_text(decision.to_json(), encoding="utf-8")
            draft.replace(target)
        except OSError:
            if draft != target:
                draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot write the lock {os.fspath(path)!r}: {error.strerror or error}",
            source=str(target),
            remedy="name a file in a folder that exists",
        ) from error


def load_lock(path: str | os.PathLike[str], catalog: Catalog | None = None) -> Decision:
    """Return the decision of a lock file, after checking that this process has the same distributions.

    Args:
        path: A file that ``write_lock`` or ``attnplug resolve -o`` wrote.
        catalog: What is installed here; the environment's by default.

    Raises:
        ConfigError: The file is absent or no lock.
        BackendIncompatible: It is for another contract, or a distribution is absent or of another version here.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the lock {path}: {error}", source=str(path), remedy="attnplug resolve -o FILE writes one"
        ) from error
    decision = Decision.from_json(text, source=str(path))
    verify_lock(decision, catalog or Catalog(), source=str(path))
    return decision


def verify_lock(decision: Decision, catalog: Catalog, *, source: str = "lock") -> None:
    """Raise BackendIncompatible, naming every difference, where this process lacks what a decision chose."""
    if decision.contract[0] != CONTRACT[0] or decision.contract[1] > CONTRACT[1]:
        raise BackendIncompatible(
            f"{source} was made for contract {decision.contract[0]}.{decision.contract[1]}; this core speaks "
            f"{CONTRACT[0]}.{CONTRACT[1]}",
            remedy="install the same attnplug everywhere, or resolve again here",
        )
    wanted: dict[Candidate, None] = dict.fromkeys(choice.chosen for choice in decision.choices)
    faults, remedies = [], []
    for candidate in wanted:
        fault = _difference(candidate, catalog)
        if fault:
            faults.append(f"{candidate.name}: {fault}")
            remedies.append(f"{candidate.distribution}=={candidate.version}")
    if faults:
        raise BackendIncompatible(
            f"{source} chose backends that this environment does not have:\n  " + "\n  ".join(faults),
            remedy=f"pip install {' '.join(remedies)}, or resolve again here: attnplug resolve -o FILE",
        )


def _difference(candidate: Candidate, catalog: Catalog) -> str:
    try:
        entry = catalog.require(candidate.name)
    except AttnplugError as error:
        return error.message
    if canonical_name(entry.distribution) != canonical_name(candidate.distribution):
        return f"locked from {candidate.distribution}, here announced by {entry.distribution}"
    if entry.version != candidate.version:
        return f"locked {candidate.distribution} {candidate.version}, here {entry.version}"
    return ""
