"""Load plugins when they are selected, and create their backends: a typed face over pluggy's hooks.

One small plugin manager a role holds the observers and exactly one backend's plugin, so that no other vendor's plugin
can answer a hook that asks for one result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy
from pydantic import BaseModel

from ._metadata import canonical_name
from .catalog import Catalog
from .config import AttentionConfig
from .decision import Choice, Decision
from .device import DeviceFacts
from .entry import State
from .errors import AttnplugError, BackendIncompatible, BackendLoadError, ConfigError
from .plugin import (
    LoadedPlugin,
    culprit,
    failed,
    load_observer,
    load_plugin,
    named,
    new_plugin_manager,
    probe_plugin,
    require_backend,
    run_wrap_hook,
    texts,
    validate_options,
)
from .request import Request, Role

if TYPE_CHECKING:
    import typer

    from .assembly.env import BackendEnv
    from .backend import AttentionBackend

__all__ = ["BackendManager", "Created"]

logger = logging.getLogger(__name__)


class Created(NamedTuple):
    """A backend and the name of the plugin that made it, which differs from the decision's after a fallback."""

    backend: AttentionBackend
    name: str


class BackendManager:
    """Loads, probes and creates backends for one deployment.

    Never a module global: two engines in a process have one each.

    Args:
        catalog: What is installed; the environment's, under the configuration's settings, by default.
        config: Its ``plugins.load`` names the observers; its ``backend`` tables hold the options.
    """

    def __init__(self, catalog: Catalog | None = None, config: AttentionConfig | None = None) -> None:
        self.config = config or AttentionConfig()
        self.catalog = self.config.catalog() if catalog is None else catalog
        self._loaded: dict[str, LoadedPlugin] = {}
        self._roles: dict[tuple[str, str], pluggy.PluginManager] = {}
        self._observers: dict[str, object] = {}
        self._cold = new_plugin_manager()
        self.config.check_requires()
        for name in self.config.plugins.load:
            source = self.config.rung("plugins.load").source
            self.add_observer(name, load_observer(name, self.catalog.scan, source=source))

    @property
    def observers(self) -> tuple[str, ...]:
        """Names of the registered plugins without a backend, in order."""
        return tuple(self._observers)

    def add_observer(self, name: str, plugin: object) -> None:
        """Register a plugin without a backend; it is told of the backends created so far.

        Raises:
            ConfigError: One of that name is registered.
            BackendLoadError: A hook of it has an unknown name or argument, or raises when told of the backends created
                so far; it is registered nowhere then.
        """
        if name in self._observers:
            raise ConfigError(f"observer {name!r} is registered already", key="plugins.load", value=name)
        # Tried on an empty manager first, so that a refused plugin is not left half registered in some roles.
        trial = new_plugin_manager()
        try:
            trial.register(plugin, name)
            trial.check_pending()
        except pluggy.PluginValidationError as error:
            raise BackendLoadError(f"plugin {name!r} cannot be registered: {error}") from error
        managers = (self._cold, *self._roles.values())
        try:
            for manager in managers:
                with named(manager.hook, "attnplug_backend_created", name):
                    manager.register(plugin, name)
        except AttnplugError:
            for manager in managers:
                if manager.has_plugin(name):
                    manager.unregister(name=name)
            raise
        self._observers[name] = plugin

    def load(self, name: str) -> LoadedPlugin:
        """Import a backend's plugin, once.

        Raises:
            AttnplugError: The name is unknown or unusable, or the plugin fails to load (BackendLoadError).
        """
        entry = self.catalog.require(name)
        if entry.name not in self._loaded:
            self._loaded[entry.name] = load_plugin(entry, self.catalog)
        return self._loaded[entry.name]

    def probe(self, name: str, device: DeviceFacts) -> list[str]:
        """Return a plugin's run-time reasons against a device; empty where it runs there."""
        loaded = self.load(name)
        try:
            return probe_plugin(loaded, device)
        # Foreign code: a probe that raises is that backend's failure, raised again with its name on it.
        except Exception as error:
            raise failed(loaded.entry, self.catalog, f"probe {device}", error) from error

    def preferred(self, request: Request) -> Sequence[str]:
        """Return the observers' order of names for a request, the first registered first."""
        with named(self._cold.hook, "attnplug_resolve"):
            answers = self._cold.hook.attnplug_resolve(request=request)
            return list(dict.fromkeys(texts(answers, "attnplug_resolve")))

    def options(self, name: str, section: Mapping[str, Any] | None = None) -> BaseModel | None:
        """Return a backend's validated options; None where its plugin has no model.

        Args:
            name: The backend.
            section: Its options; the configuration's ``[backend.NAME]`` by default.
        """
        loaded = self.load(name)
        if section is None:
            section = self.config.backend.get(loaded.name, {})
        source = next((self.config.rung(f"backend.{loaded.name}.{key}").source for key in section), "")
        return validate_options(loaded, section, source)

    def create_backend(
        self,
        role: Role | str,
        name: str,
        env: BackendEnv,
        options: BaseModel | Mapping[str, Any] | None = None,
        *,
        wrap: bool = True,
    ) -> AttentionBackend:
        """Create a backend for a role, wrap it, and tell the observers.

        Args:
            role: What it will serve.
            name: The backend.
            env: Where it runs.
            options: Its options, validated or raw; the configuration's ``[backend.NAME]`` by default.
            wrap: Whether the observers' wrap hooks run now, after the plugin's own; who composes backends calls
                ``wrap_backend`` later.

        Raises:
            BackendLoadError: The plugin fails to load or to create.
            ContractViolation: It returned something that is no ``AttentionBackend``.
        """
        loaded = self.load(name)
        if not isinstance(options, BaseModel):
            options = self.options(loaded.name, options)
        hooks = self._role_manager(Role(role), loaded).hook
        backend: AttentionBackend
        try:
            backend = hooks.attnplug_create_backend(name=loaded.name, env=env, options=options)
        except AttnplugError:
            raise  # Already says what, and is no failure of the plugin: it refused what it was asked.
        # Foreign code, as in load_plugin.
        except (Exception, SystemExit) as error:
            if culprit(hooks, "attnplug_create_backend", error) in self._observers:
                with named(hooks, "attnplug_create_backend"):
                    raise
            raise failed(loaded.entry, self.catalog, "create its backend", error) from error
        require_backend(backend, f"attnplug_create_backend of {loaded.entry.dist}")
        backend = run_wrap_hook(loaded.name, loaded.plugin, backend, env)
        if wrap:
            backend = self.wrap_backend(backend, env)
        with named(hooks, "attnplug_backend_created"):
            hooks.attnplug_backend_created.call_historic(
                kwargs={"name": loaded.name, "backend": backend, "spec": loaded.spec}
            )
        self.catalog.mark(loaded.entry, State.READY)
        return backend

    def create(self, decision: Decision, role: Role | str, env: BackendEnv, *, wrap: bool = True) -> Created:
        """Create the backend that a decision chose for a role, falling back only as the decision allows.

        Raises:
            BackendLoadError: It fails to load and no permitted alternative loads; holds every failure.
            BackendIncompatible: What is installed differs from what the decision names.
        """
        choice = decision.choice(role)
        if choice is None:
            raise ConfigError(f"the decision has no role {Role(role).value!r}", key="role", value=Role(role).value)
        failures = []
        for candidate in (choice.chosen, *choice.alternatives):
            try:
                self._verify(candidate.name, candidate.distribution, candidate.version)
                backend = self.create_backend(choice.role, candidate.name, env, wrap=wrap)
            except BackendLoadError as error:
                failures.append(error)
                continue
            if failures:
                logger.warning(
                    "%s: %s; falling back to %s, as fallback = %r allows",
                    choice.role.value,
                    failures[-1].message,
                    candidate,
                    decision.fallback,
                )
            return Created(backend, candidate.name)
        raise _no_backend(choice, decision, failures) from failures[0]

    def wrap_backend(self, backend: AttentionBackend, env: BackendEnv) -> AttentionBackend:
        """Run the observers' wrap hooks, as they were registered.

        Args:
            backend: A backend, or a composition of several.
            env: Where it runs.
        """
        for name, plugin in self._observers.items():
            backend = run_wrap_hook(name, plugin, backend, env)
        return backend

    def explain(self, decision: Decision) -> list[str]:
        """Show a decision to the observers and return the lines they add."""
        with named(self._cold.hook, "attnplug_explain"):
            return texts(self._cold.hook.attnplug_explain(decision=decision), "attnplug_explain")

    def register_cli(self, app: typer.Typer) -> None:
        """Let the observers add their commands."""
        with named(self._cold.hook, "attnplug_register_cli"):
            self._cold.hook.attnplug_register_cli(app=app)

    def _role_manager(self, role: Role, loaded: LoadedPlugin) -> pluggy.PluginManager:
        key = (role.value, loaded.name)
        if key not in self._roles:
            manager = new_plugin_manager()
            manager.register(loaded.plugin, loaded.name)
            for name, plugin in self._observers.items():
                if plugin is not loaded.plugin:
                    manager.register(plugin, name)
            self._roles[key] = manager
        return self._roles[key]

    def _verify(self, name: str, distribution: str, version: str) -> None:
        entry = self.catalog.get(name)
        if canonical_name(entry.distribution) != canonical_name(distribution) or entry.version != version:
            raise BackendIncompatible(
                f"the decision chose {name!r} of {distribution} {version}; here it is of {entry.dist}",
                remedy=f"pip install {distribution}=={version}, or resolve again here",
            )


def _no_backend(choice: Choice, decision: Decision, failures: Sequence[BackendLoadError]) -> BackendLoadError:
    text = "\n  ".join(failure.message for failure in failures)
    if len(failures) == 1 and decision.fallback == "never":
        return BackendLoadError(
            f"{choice.role.value}: {text}",
            remedy=f"{failures[0].remedy}; or allow another: [attention] fallback = 'listed' or 'reference'",
        )
    return BackendLoadError(
        f"{choice.role.value}: no backend that fallback = {decision.fallback!r} allows loads:\n  {text}",
        remedy=failures[0].remedy,
    )
