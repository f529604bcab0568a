"""The configuration: TOML's tables as pydantic models, and the ladder that fills them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, ValidationError, field_validator

from ._faults import config_error
from ._metadata import installed_version
from .catalog import Catalog
from .errors import ConfigError
from .sources import AUTO_RUNG, CODE, FILE, Rung, Sources, read_file, read_sources

Name = Annotated[str, StringConstraints(strict=True, min_length=1, pattern=r"^[A-Za-z0-9_.\-]+$")]
Names = Name | Annotated[list[Name], Field(min_length=1)]
"""A backend's name, an ordered list of them, or "auto"; "auto" may end a list."""
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
KVDtype = Literal["auto", "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


class _Table(BaseModel):
    """A table of the configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DraftTable(_Table):
    """``[attention.draft]``: backends of the draft worker; those of the target where not given."""

    prefill: Names | None = None
    decode: Names | None = None


class AttentionTable(_Table):
    """``[attention]``: which backends, and the pools they share."""

    prefill: Names = "auto"
    decode: Names = "auto"
    linear: Names = "auto"
    speculative_attention_mode: Literal["prefill", "decode"] = "decode"
    """Which side's backend serves target-verify."""
    fallback: Literal["never", "listed", "reference"] = "never"
    """When a chosen backend fails to load: raise; take the next that was listed; take the reference backend."""
    kv_dtype: KVDtype = "auto"
    """The pool's dtype, by torch's name; "auto": the model's."""
    page_size: PositiveInt | Literal["auto"] = "auto"
    """Tokens a page; "auto": 16 on a CPU and 64 on CUDA where the backends accept it, else one they share."""
    graphs: Literal["auto", "off"] = "auto"
    """Whether steps are captured in CUDA graphs where the backends allow it."""
    graph_buckets: tuple[PositiveInt, ...] = ()
    """Batch sizes to capture; empty: the engine's own."""
    draft: DraftTable = DraftTable()


class PluginsTable(_Table):
    """``[plugins]``: which distributions may run code here."""

    block: tuple[Name, ...] = ()
    """Backends, or distributions, that may not be used; no code of theirs runs."""
    allow: tuple[Name, ...] | None = None
    """Where given, only these may be used."""
    load: tuple[Name, ...] = ()
    """Plugins without a backend (group ``attnplug.plugins.v1``) to turn on, in order."""
    strict: bool = Field(default=False, strict=True)
    """Whether a broken, conflicting or incompatible plugin is an error even where another is chosen."""


class AttentionConfig(_Table):
    """The whole configuration; its fields are the TOML file's tables."""

    attention: AttentionTable = AttentionTable()
    backend: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    """``[backend.NAME]``: each backend's own options, validated by its plugin's model when it is created."""
    plugins: PluginsTable = PluginsTable()
    requires: dict[Name, str] = Field(default_factory=dict)
    """Version ranges of distributions, checked before anything loads."""
    provider: dict[Name, Name] = Field(default_factory=dict)
    """For a backend that several distributions announce, the distribution that is meant."""

    _rungs: dict[str, Rung] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Compare what is configured; where it came from does not count."""
        return isinstance(other, AttentionConfig) and self.__dict__ == other.__dict__

    @field_validator("requires")
    @classmethod
    def _valid_specifiers(cls, requires: dict[str, str]) -> dict[str, str]:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        wrong = []
        for name, text in requires.items():
            try:
                SpecifierSet(text)
            except InvalidSpecifier:
                wrong.append(f"{name} = {text!r}")
        if wrong:
            raise ValueError(f"not version ranges: {', '.join(wrong)}; allowed: such as '>=0.3,<0.4'")
        return requires

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> AttentionConfig:
        """Make a configuration of plain tables.

        Raises:
            ConfigError: Naming every key at fault, its value, what is allowed, and the nearest right key.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise config_error(error, cls, source="configuration") from error

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> AttentionConfig:
        """Read a TOML, JSON or YAML file alone, without the other rungs of the ladder.

        Raises:
            ConfigError: The file cannot be read, or a key or value in it is wrong.
        """
        sources = Sources()
        sources.merge(read_file(path), Rung(FILE, str(path)))
        return cls.from_sources(sources, source=str(path))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        overrides: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> AttentionConfig:
        """Climb the ladder: command line > environment > file > pyproject > auto; see ``sources.read_sources``."""
        return cls.from_sources(read_sources(path, overrides=overrides, env=env, cwd=cwd))

    @classmethod
    def from_sources(cls, sources: Sources, *, source: str = "") -> AttentionConfig:
        """Validate raw data, keeping the rung of each key."""
        try:
            config = super().model_validate(sources.data)
        except ValidationError as error:
            raise config_error(error, cls, source=source, rungs=sources.rungs) from error
        config._rungs.update(sources.rungs)
        return config

    def names(self, key: str) -> tuple[str, ...] | None:
        """Return the names asked for at ``attention.prefill`` and the like, in order; None where nothing is."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return None if value is None else (value,) if isinstance(value, str) else tuple(value)

    def rung(self, key: str) -> Rung:
        """Return the rung of the ladder that decided a dotted key."""
        if key in self._rungs:
            return self._rungs[key]
        value: Any = self
        for part in key.split("."):
            if not isinstance(value, BaseModel) or part not in value.model_fields_set:
                return Rung(AUTO_RUNG)
            value = getattr(value, part)
        return Rung(CODE)

    def catalog(self) -> Catalog:
        """Return what is installed, under this configuration's block, allow and provider settings."""
        plugins = self.plugins
        return Catalog(block=plugins.block, allow=plugins.allow, providers=self.provider)

    def check_requires(self) -> None:
        """Check ``[requires]`` against what is installed.

        Raises:
            ConfigError: Naming every violation at once.
        """
        from packaging.specifiers import SpecifierSet

        faults, remedies = [], []
        for name, text in self.requires.items():
            version = installed_version(name)
            if version is None or not SpecifierSet(text).contains(version, prereleases=True):
                faults.append(f"requires.{name}: asked {text}, {'not installed' if version is None else version}")
                remedies.append(f"'{name}{text}'")
        if faults:
            rung = self.rung(f"requires.{next(iter(self.requires))}")
            raise ConfigError(
                "what [requires] asks for is not installed:\n  " + "\n  ".join(faults),
                source=rung.source,
                key="requires",
                remedy=f"pip install {' '.join(remedies)}",
            )
