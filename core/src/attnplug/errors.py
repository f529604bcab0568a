"""One family of errors. Each says what is wrong, the actual value, the allowed ones and the remedy, all at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Reason(NamedTuple):
    """Why a backend does not fit: the field, what was asked for, and what the backend supports."""

    field: str
    asked: str
    supported: str

    def __str__(self) -> str:
        return f"{self.field}: asked {self.asked}, supported {self.supported}"


class AttnplugError(Exception):
    """Base of every error that a user or a plugin author can mend.

    Args:
        message: What is wrong, with the actual and the allowed values.
        remedy: What to do about it; printed on its own line.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message}\n  remedy: {remedy}" if remedy else message)


class ConfigError(AttnplugError):
    """A configuration file, environment variable or option holds what it may not.

    Args:
        message: What is wrong.
        source: The file, variable or option.
        key: Dotted key inside the source, empty for the whole source.
        value: The value found.
        allowed: What would be accepted, in words.
        remedy: What to do about it.
    """

    def __init__(
        self, message: str, *, source: str = "", key: str = "", value: str = "", allowed: str = "", remedy: str = ""
    ) -> None:
        self.source, self.key, self.value, self.allowed = source, key, value, allowed
        super().__init__(message, remedy=remedy)


class UnknownBackend(AttnplugError):
    """A name that no installed distribution announces."""


class BackendConflict(AttnplugError):
    """Two distributions announce one name, and nothing says which is meant."""


class BackendIncompatible(AttnplugError):
    """A plugin was built for another contract, or needs a feature that this core does not have."""


class BackendRejected(AttnplugError):
    """No candidate can serve the request.

    Args:
        message: What was asked for.
        reasons: For each candidate every reason against it.
        remedy: What to do about it.
    """

    def __init__(self, message: str, *, reasons: Mapping[str, Sequence[Reason]], remedy: str = "") -> None:
        self.reasons: dict[str, tuple[Reason, ...]] = {name: tuple(rows) for name, rows in reasons.items()}
        lines = [f"  {name}: {reason}" for name, rows in self.reasons.items() for reason in rows]
        super().__init__("\n".join([message, *lines]), remedy=remedy)


class BackendLoadError(AttnplugError):
    """A selected plugin failed to import, register or create its backend."""


class UnsupportedModel(AttnplugError):
    """A model, checkpoint or request that the engine cannot serve."""


class BatchError(AttnplugError):
    """A batch, a slot or a table that breaks its schema; names every field at fault."""

    def __init__(self, problems: Iterable[str], *, remedy: str = "") -> None:
        self.problems = tuple(problems)
        super().__init__("invalid batch:\n  " + "\n  ".join(self.problems), remedy=remedy)


class OutOfPages(AttnplugError):
    """A pool has too few free pages for what was asked."""


class ContractViolation(AttnplugError):
    """A backend did what the contract forbids."""
