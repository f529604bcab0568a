"""One row of the catalog: a backend's name, who announces it, its state, and why it is in that state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import EntryPoint

from ._metadata import Dist
from .errors import Reason
from .spec import BackendSpec


class State(str, Enum):
    """How far a backend has come, or what stopped it; the same words in listings, errors and locks."""

    FOUND = "FOUND"
    """Announced by metadata; no code of it has run."""
    DESCRIBED = "DESCRIBED"
    """Its spec is read, valid and compatible, and its kernel library is installed."""
    ELIGIBLE = "ELIGIBLE"
    """It can serve the request, and another was preferred."""
    REJECTED = "REJECTED"
    """It cannot serve the request; the reasons say why."""
    SELECTED = "SELECTED"
    LOADED = "LOADED"
    """Its plugin is imported and registered."""
    READY = "READY"
    """It has created a backend."""
    BLOCKED = "BLOCKED"
    """The configuration keeps it out; no code of it has run."""
    BROKEN_SPEC = "BROKEN_SPEC"
    """Its spec fails to import or is invalid, or one of its two entry points is missing."""
    INCOMPATIBLE = "INCOMPATIBLE"
    """It speaks another contract, or needs a feature that this core does not have."""
    CONFLICT = "CONFLICT"
    """Two distributions announce the name, and no ``[provider]`` says which is meant."""
    MISSING_KERNEL = "MISSING_KERNEL"
    """Its kernel library is absent, or of a version outside the declared range."""
    BROKEN_LOAD = "BROKEN_LOAD"
    """Its plugin failed to import, register or create a backend."""

    @property
    def usable(self) -> bool:
        """Whether a backend in this state may be considered for a request."""
        return self in _USABLE


_USABLE = frozenset(
    {State.DESCRIBED, State.ELIGIBLE, State.REJECTED, State.SELECTED, State.LOADED, State.READY},
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A backend as this process sees it. Frozen: a change of state makes another one in the catalog."""

    name: str
    state: State
    dist: Dist
    contract_major: int
    spec: BackendSpec | None = None
    spec_entry_point: EntryPoint | None = None
    backend_entry_point: EntryPoint | None = None
    reasons: tuple[Reason, ...] = ()
    error: str = ""
    """Type and message of what the plugin's code raised, where that is the reason."""
    traceback: str = ""
    notes: tuple[str, ...] = ()
    """What a reader should know that is no reason against it."""

    @property
    def distribution(self) -> str:
        return self.dist.name

    @property
    def version(self) -> str:
        return self.dist.version

    def moved(self, state: State, *reasons: Reason, error: str = "", traceback: str = "") -> Entry:
        """Return this row in another state, with what put it there."""
        return replace(self, state=state, reasons=tuple(reasons), error=error, traceback=traceback)

    def as_dict(self) -> dict[str, object]:
        """Return the row as plain data, for JSON."""
        spec = self.spec
        return {
            "name": self.name,
            "state": self.state.value,
            "distribution": self.distribution,
            "version": self.version,
            "contract": self.contract_major,
            "summary": spec.summary if spec else "",
            "aliases": list(spec.aliases) if spec else [],
            "kinds": sorted(kind.value for kind in spec.kinds) if spec else [],
            "device_types": sorted(spec.device_types) if spec else [],
            "phases": sorted(phase.value for phase in spec.phases) if spec else [],
            "features": sorted(feature.value for feature in spec.features) if spec else [],
            "priority": spec.priority if spec else None,
            "reasons": [reason._asdict() for reason in self.reasons],
            "error": self.error,
            "notes": list(self.notes),
        }
