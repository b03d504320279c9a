"""From a method's name to its two halves; the only place where the halves meet.

A method registers itself at the end of its strategy file with one line. A built-in name ``x`` means the module
``strategies.x``; a method of a user's own is named ``package.module:Name``. This file knows no method.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRATEGIES = "strategies"


class UnknownMethod(ValueError):
    """A method name that leads nowhere."""


@dataclass(frozen=True)
class Method:
    """One method: its name (also its section in the run config), its strategy class, settings class and site module.

    ``site`` is the dotted name of the module with ``train(site, modules, settings, ...)``; only sites import it.
    ``prepare``: that of a module with ``prepare(settings)``, which makes local files that a simulation needs; or "".
    """

    name: str
    strategy: type[Any]
    settings: type[Any]
    site: str
    prepare: str = ""


_METHODS: dict[str, Method] = {}


def register(name: str, strategy: type[Any], *, settings: type[Any], site: str, prepare: str = "") -> None:
    """Makes a strategy known under a name. Raises ValueError where the name belongs to another class."""
    known = _METHODS.get(name)
    if known is not None and known.strategy.__qualname__ != strategy.__qualname__:
        raise ValueError(f"method {name!r} is registered twice: {known.strategy!r} and {strategy!r}; rename one")
    _METHODS[name] = Method(name, strategy, settings, site, prepare)


def find(method: str) -> Method:
    """The method of this name; imports its strategy file. Raises UnknownMethod with the names there are."""
    if ":" in method:
        return _find_class(method)
    if method not in _METHODS and method in candidates():
        importlib.import_module(f"{STRATEGIES}.{method}")
    if method not in _METHODS:
        raise UnknownMethod(
            f"no method {method!r}; there are: {', '.join(names())}, or your own as package.module:Name"
        )
    return _METHODS[method]


def prepare_simulation(method: str, settings: Any) -> None:
    """Lets a method make the local files that a simulation of it needs, where it has any; before any site starts."""
    if module := find(method).prepare:
        importlib.import_module(module).prepare(settings)


def _find_class(method: str) -> Method:
    module_name, _, class_name = method.partition(":")
    try:
        strategy = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownMethod(f"method {method!r} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    for known in _METHODS.values():
        if known.strategy is strategy:
            return known
    raise UnknownMethod(
        f"{method!r} is imported but not registered; end its file with register('name', {class_name}, ...)"
    )


def candidates() -> list[str]:
    """Names of the modules that register a method of their name, found by reading, without importing them."""
    folders = importlib.import_module(STRATEGIES).__path__
    found = (Path(folder) / f"{module.name}.py" for folder in folders for module in pkgutil.iter_modules([folder]))
    return sorted(path.stem for path in found if f'register("{path.stem}"' in path.read_text(encoding="utf-8"))


def names() -> list[str]:
    """Every built-in method; imports all their strategy files (slow, for messages and tools only)."""
    for candidate in candidates():
        importlib.import_module(f"{STRATEGIES}.{candidate}")
    return sorted(_METHODS)
