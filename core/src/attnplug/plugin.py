"""Loading of one plugin: imported from the catalog's own entry point, checked against the hooks, options validated."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy
from pydantic import BaseModel, ValidationError

from . import known
from ._faults import config_error
from ._metadata import PLUGINS_GROUP, Announcement, Scan
from .catalog import Catalog
from .entry import Entry, State
from .errors import AttnplugError, BackendLoadError, ConfigError, ContractViolation, Reason
from .hookspecs import PROJECT, HookSpecs
from .spec import BackendSpec

if TYPE_CHECKING:
    from .assembly.env import BackendEnv
    from .backend import AttentionBackend
    from .device import DeviceFacts


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A backend's plugin after import."""

    name: str
    entry: Entry
    spec: BackendSpec
    plugin: object
    """The module, or object, that the entry point named."""


def new_plugin_manager() -> pluggy.PluginManager:
    """Return an empty plugin manager that knows the hooks."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    return manager


def load_plugin(entry: Entry, catalog: Catalog) -> LoadedPlugin:
    """Import a backend's plugin and check its hooks; on failure nothing of it stays registered.

    The catalog's own entry point is loaded: pluggy's loader takes the first distribution of a name, which need not be
    the one that ``[provider]`` means.

    Raises:
        BackendLoadError: Naming distribution, version and cause; the row becomes BROKEN_LOAD.
    """
    assert entry.spec is not None, "only a usable row is loaded"
    assert entry.backend_entry_point is not None, "only a usable row is loaded"
    value = entry.backend_entry_point.value
    try:
        plugin = entry.backend_entry_point.load()
        check_hooks(entry.name, plugin)
    # Foreign code: whatever it raises at import is one plugin's failure, and is raised again with its name on it.
    except (Exception, SystemExit) as error:
        raise failed(entry, catalog, f"load {value}", error) from error
    catalog.mark(entry, State.LOADED)
    return LoadedPlugin(entry.name, entry, entry.spec, plugin)


def check_hooks(name: str, plugin: object) -> None:
    """Raise PluginValidationError where a hook has an unknown name or argument, or where none creates a backend."""
    trial = new_plugin_manager()
    trial.register(plugin, name)
    trial.check_pending()
    if not trial.hook.attnplug_create_backend.get_hookimpls():
        raise pluggy.PluginValidationError(plugin, "it has no hook attnplug_create_backend")


def failed(entry: Entry, catalog: Catalog, action: str, error: BaseException) -> BackendLoadError:
    """Put a failure of a plugin's code on its row, and return the error that names it."""
    text = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    catalog.mark(entry, State.BROKEN_LOAD, Reason("load", action, text), error=text, traceback=trace)
    if isinstance(error, ImportError):
        remedy = f"pip install '{entry.distribution}[kernel]' brings its kernel library; or choose another backend"
    else:
        remedy = f"upgrade or repair {entry.distribution}, or choose another backend; attnplug doctor shows more"
    return BackendLoadError(
        f"backend {entry.name!r} of {entry.distribution} {entry.version} failed to {action}: {text}", remedy=remedy
    )


@contextmanager
def named(hooks: pluggy.HookRelay, hook: str, who: str = "") -> Iterator[None]:
    """Raise what a hook raises again as one error that names the plugin whose hook it was: ``who``, if it is known.

    Raises:
        BackendLoadError: Naming the plugin, the hook and the cause.
    """
    try:
        yield
    except AttnplugError:
        raise  # Already says what and who.
    # Foreign code: hooks raise whatever they like.
    except Exception as error:
        who = who or culprit(hooks, hook, error)
        raise BackendLoadError(
            f"{f'plugin {who!r}' if who else 'a plugin'} failed in {hook}: {type(error).__name__}: {error}",
            remedy="repair or upgrade it, or take it out of the configuration",
        ) from error


def culprit(hooks: pluggy.HookRelay, hook: str, error: BaseException) -> str:
    """Return the plugin whose hook raised: that of the innermost frame which is one, else the only one; or nothing."""
    found = getattr(hooks, hook).get_hookimpls()
    codes = {getattr(one.function, "__code__", None): one.plugin_name for one in found}
    name, trace = found[0].plugin_name if len(found) == 1 else "", error.__traceback__
    while trace is not None:
        name, trace = codes.get(trace.tb_frame.f_code, name), trace.tb_next
    return name


def texts(answers: Sequence[object], hook: str) -> list[str]:
    """Return the texts of hooks that each return a list of them or None, those of the first registered first.

    Raises:
        TypeError: One returned something else.
    """
    lines: list[str] = []
    for answer in reversed(answers):  # pluggy calls the last registered first.
        if answer is not None and not (
            isinstance(answer, (list, tuple)) and all(isinstance(one, str) for one in answer)
        ):
            raise TypeError(f"{hook} returned {answer!r}; allowed: a list of texts, or None")
        lines.extend(answer or ())
    return lines


def validate_options(loaded: LoadedPlugin, section: Mapping[str, Any], source: str = "") -> BaseModel | None:
    """Return a backend's options as its plugin's own model; None where it has none.

    Raises:
        ConfigError: A key or value of the section is wrong, or there is a section and no model.
    """
    trial = new_plugin_manager()
    trial.register(loaded.plugin, loaded.name)
    with named(trial.hook, "attnplug_options_model"):
        model = trial.hook.attnplug_options_model()
    key = f"backend.{loaded.name}"
    if model is None:
        if section:
            raise ConfigError(
                f"[{key}] sets {', '.join(sorted(section))}, but backend {loaded.name!r} has no options",
                source=source,
                key=key,
                value=repr(dict(section)),
                allowed="no keys",
                remedy=f"remove [{key}]",
            )
        return None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise BackendLoadError(
            f"attnplug_options_model of {loaded.entry.dist} returned {model!r}; allowed: a subclass of "
            "pydantic.BaseModel",
            remedy=f"upgrade or repair {loaded.entry.distribution}",
        )
    near_keys = sorted(set(section) - set(model.model_fields))
    if near_keys and model.model_config.get("extra") != "forbid":
        # A model that ignores unknown keys would turn a typo into a default without a word.
        model = type(model.__name__, (model,), {"model_config": {"extra": "forbid"}, "__module__": model.__module__})
    try:
        options: BaseModel = model.model_validate(dict(section))
    except ValidationError as error:
        raise config_error(error, model, source=source or "configuration", prefix=key) from error
    return options


def probe_plugin(loaded: LoadedPlugin, device: DeviceFacts) -> list[str]:
    """Return every run-time reason that a plugin gives against a device."""
    trial = new_plugin_manager()
    trial.register(loaded.plugin, loaded.name)
    return texts(trial.hook.attnplug_probe(spec=loaded.spec, device=device), "attnplug_probe")


def load_observer(name: str, installed: Scan, *, source: str = "") -> object:
    """Import a plugin without a backend, from the one distribution that announces it.

    Raises:
        ConfigError: None announces it, or several do.
        BackendLoadError: It fails to import.
    """
    announced = installed.group(PLUGINS_GROUP)
    found = [one for one in announced if one.name == name]
    if len(found) != 1:
        raise _no_observer(name, found, [one.name for one in announced], source)
    try:
        plugin: object = found[0].entry_point.load()
    # Foreign code, as in load_plugin: raised again with its name on it.
    except (Exception, SystemExit) as error:
        raise BackendLoadError(
            f"plugin {name!r} of {found[0].dist} failed to load: {type(error).__name__}: {error}",
            remedy=f"repair {found[0].dist.name}, or take {name!r} out of [plugins] load",
        ) from error
    return plugin


def _no_observer(name: str, found: Sequence[Announcement], names: Sequence[str], source: str) -> ConfigError:
    if found:
        dists = ", ".join(str(a.dist) for a in found)
        return ConfigError(f"plugin {name!r} is announced by {dists}", source=source, key="plugins.load", value=name)
    hint = known.did_you_mean(name, names)
    allowed = ", ".join(sorted(names)) or "none is installed"
    return ConfigError(
        f"nothing installed announces a plugin {name!r} in {PLUGINS_GROUP}; installed: {allowed}. {hint}".strip(),
        source=source,
        key="plugins.load",
        value=name,
        allowed=allowed,
        remedy="install the distribution that brings it, or take it out of [plugins] load",
    )


def run_wrap_hook(name: str, plugin: object, backend: AttentionBackend, env: BackendEnv) -> AttentionBackend:
    """Run one plugin's wrap hook alone: a broadcast would give all the same backend."""
    alone = new_plugin_manager()
    alone.register(plugin, name)
    with named(alone.hook, "attnplug_wrap_backend"):
        answers = alone.hook.attnplug_wrap_backend(backend=backend, env=env)
    for wrapped in answers:
        if wrapped is not None:
            require_backend(wrapped, f"attnplug_wrap_backend of {name}")
            backend = wrapped
    return backend


def require_backend(backend: object, who: str) -> None:
    """Raise ContractViolation where what a hook returned is no backend."""
    from .backend import AttentionBackend

    if not isinstance(backend, AttentionBackend):
        raise ContractViolation(
            f"{who} returned a {type(backend).__name__}; allowed: an attnplug.backend.AttentionBackend"
        )
