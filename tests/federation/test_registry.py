"""From a method's name to its halves."""

from __future__ import annotations

import sys
import types

import pytest

from federation import registry
from federation.registry import UnknownMethod, find, names, register
from federation.settings import MethodArea

BUILT_IN = ["centralised", "fedavg", "fedprox", "local", "scaffold"]


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    names()  # a strategy file registers itself once in a process, so before the table is copied
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def users_module(monkeypatch, register_it=True):
    """A module of a user's own with a strategy class ``Mine``."""
    module = types.ModuleType("users_methods")
    module.Mine = type("Mine", (), {})
    monkeypatch.setitem(sys.modules, "users_methods", module)
    if register_it:
        register("mine", module.Mine, settings=MethodArea, site="users_site")
    return module


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_name_leads_to_both_halves(name):
    import importlib

    method = find(name)
    assert method.name == name and method.strategy.__module__ == f"strategies.{name}"
    assert method.site == f"client_app.{name}" and issubclass(method.settings, MethodArea)
    assert callable(importlib.import_module(method.site).train)


def test_all_built_in_methods_are_listed():
    assert set(BUILT_IN) <= set(names())


@pytest.mark.parametrize("name", ["fedavgg", "", "gate", "base", "FedAvg"])
def test_unknown_name_lists_those_there_are(name):
    with pytest.raises(UnknownMethod, match=r"there are: .*fedavg, .*fedprox, .*package\.module:Name"):
        find(name)


def test_a_users_class_is_found_by_module_and_name(monkeypatch):
    module = users_module(monkeypatch)
    assert find("users_methods:Mine").strategy is module.Mine and find("users_methods:Mine").name == "mine"


@pytest.mark.parametrize("name", ["users_methods:Other", "no_such_module:Mine", ":Mine", "users_methods:"])
def test_a_users_class_that_cannot_be_imported_is_said(monkeypatch, name):
    users_module(monkeypatch)
    with pytest.raises(UnknownMethod, match=r"cannot be imported .* PYTHONPATH"):
        find(name)


def test_a_users_class_that_is_not_registered_is_told_how(monkeypatch):
    users_module(monkeypatch, register_it=False)
    with pytest.raises(UnknownMethod, match=r"end its file with register\('name', Mine, \.\.\.\)"):
        find("users_methods:Mine")


def test_a_name_belongs_to_one_class():
    with pytest.raises(ValueError, match="'fedavg' is registered twice"):
        register("fedavg", type("Other", (), {}), settings=MethodArea, site="x")
    assert find("fedavg").site == "client_app.fedavg"


def test_registering_a_reloaded_class_again_is_no_conflict():
    register("toy", type("Toy", (), {}), settings=MethodArea, site="one")
    register("toy", type("Toy", (), {}), settings=MethodArea, site="two")
    assert find("toy").site == "two"
