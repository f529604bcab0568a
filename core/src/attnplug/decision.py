"""What selection decided and why, as plain data that prints, pickles and serialises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import ConfigError, Reason
from .request import Role

FORMAT = 1
"""Version of the JSON form; a lock of another version is refused."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that fits, identified so that another process can tell that it has the same."""

    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend chosen for one role."""

    role: Role
    chosen: Candidate
    asked: tuple[str, ...]
    """The names asked for, in order; ``("auto",)`` where none was."""
    rung: str
    """Which rung of the configuration ladder asked: command line, environment, file, pyproject, code or auto."""
    source: str = ""
    """The file, variable or option on that rung."""
    alternatives: tuple[Candidate, ...] = ()
    """Others that ``fallback`` permits where the chosen one fails to load, in order; they fit the same pools."""

    @property
    def name(self) -> str:
        return self.chosen.name


@dataclass(frozen=True, slots=True)
class Rejection:
    """A candidate that was not chosen for a role because it does not fit."""

    role: Role
    name: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The outcome of ``resolve``: made once, loaded by every rank instead of resolving again."""

    choices: tuple[Choice, ...]
    rejections: tuple[Rejection, ...] = ()
    page_size: int | None = None
    """Tokens a page, one for all pools; None where no chosen backend reads a KV pool."""
    kv_dtype: str | None = None
    """torch's name of the pool's dtype; None where no model is known and none was asked for."""
    kv_layouts: Mapping[str, str] = field(default_factory=dict)
    """Layout of each KV pool ('target', 'draft'): one that all its roles accept."""
    device: str = ""
    model: str = ""
    fallback: str = "never"
    graphs: str = "auto"
    speculative_attention_mode: str = "decode"
    contract: tuple[int, int] = (1, 0)
    notes: tuple[str, ...] = ()

    def choice(self, role: Role | str) -> Choice | None:
        """Return the choice for a role, None where the deployment has no such role."""
        role = Role(role)
        return next((choice for choice in self.choices if choice.role is role), None)

    @property
    def prefill(self) -> str | None:
        """Name for prefill; on a pure state-space model the linear backend's."""
        return self._name(Role.PREFILL) or self.linear

    @property
    def decode(self) -> str | None:
        """Name for decode; on a pure state-space model the linear backend's."""
        return self._name(Role.DECODE) or self.linear

    @property
    def linear(self) -> str | None:
        return self._name(Role.LINEAR)

    @property
    def draft_prefill(self) -> str | None:
        return self._name(Role.DRAFT_PREFILL)

    @property
    def draft_decode(self) -> str | None:
        return self._name(Role.DRAFT_DECODE)

    def rejected(self, role: Role | str) -> dict[str, tuple[Reason, ...]]:
        """Return every candidate that does not fit a role, with all reasons."""
        return {one.name: one.reasons for one in self.rejections if one.role is Role(role)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: lists, dicts, texts and numbers."""
        data = asdict(self)
        data["choices"] = [
            {
                **asdict(one),
                "role": one.role.value,
                "asked": list(one.asked),
                "alternatives": [asdict(other) for other in one.alternatives],
            }
            for one in self.choices
        ]
        data["rejections"] = [
            {"role": one.role.value, "name": one.name, "reasons": [reason._asdict() for reason in one.reasons]}
            for one in self.rejections
        ]
        plain = {"kv_layouts": dict(self.kv_layouts), "contract": list(self.contract), "notes": list(self.notes)}
        return {"format": FORMAT, **data, **plain}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "") -> Decision:
        """Make a decision from what ``to_dict`` returned.

        Raises:
            ConfigError: The data is not such a decision, or of another format version.
        """
        found = data.get("format") if isinstance(data, Mapping) else None
        if found != FORMAT:
            raise ConfigError(
                f"{source or 'decision'} has format {found!r}; this core reads {FORMAT}",
                source=source,
                key="format",
                value=repr(found),
                allowed=str(FORMAT),
                remedy="resolve again with this core: attnplug resolve -o FILE",
            )
        try:
            fields = {key: value for key, value in data.items() if key != "format"}
            major, minor = fields["contract"]
            fields.update(
                choices=tuple(_choice(one) for one in fields["choices"]),
                rejections=tuple(_rejection(one) for one in fields["rejections"]),
                contract=(int(major), int(minor)),
                notes=tuple(fields.get("notes", ())),
            )
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{source or 'decision'} is not a decision: {type(error).__name__}: {error}",
                source=source,
                remedy="resolve again: attnplug resolve -o FILE",
            ) from error

    def to_json(self) -> str:
        """Return the decision as JSON text, the same text for the same decision."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "") -> Decision:
        """Make a decision from JSON text; raises ConfigError where it is none."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source or 'decision'} is not JSON: {error}", source=source) from error
        return cls.from_dict(data, source=source)

    def _name(self, role: Role) -> str | None:
        choice = self.choice(role)
        return choice.name if choice else None


def _choice(data: Mapping[str, Any]) -> Choice:
    return Choice(
        role=Role(data["role"]),
        chosen=Candidate(**data["chosen"]),
        asked=tuple(data["asked"]),
        rung=data["rung"],
        source=data["source"],
        alternatives=tuple(Candidate(**one) for one in data["alternatives"]),
    )


def _rejection(data: Mapping[str, Any]) -> Rejection:
    return Rejection(Role(data["role"]), data["name"], tuple(Reason(**one) for one in data["reasons"]))
