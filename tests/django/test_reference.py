"""The reference of the Django app has everything that only a project which is set up can list."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.apps import apps
from django.dispatch import Signal

from relaybox.contrib.django import signals
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.querysets import OutboxEventQuerySet, OutboxQuerySet

PAGE = (Path(__file__).parents[2] / "docs/reference/django.md").read_text()

MODELS = [model.__name__ for model in apps.get_app_config("relaybox").get_models()]
VERBS = [
    name
    for name in vars(OutboxEventQuerySet)
    if not name.startswith("_") and name not in vars(OutboxQuerySet)
]
SIGNALS = [name for name, value in vars(signals).items() if isinstance(value, Signal)]
PERMISSIONS = [name for name, _ in OutboxEvent._meta.permissions]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_there(name: str) -> None:
    assert f"{name}`" in PAGE


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_is_there(name: str) -> None:
    assert f"`{name}(" in PAGE


@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_is_there(name: str) -> None:
    assert f"| `{name}` |" in PAGE


@pytest.mark.parametrize("name", PERMISSIONS)
def test_every_permission_is_there(name: str) -> None:
    assert f"`relaybox.{name}`" in PAGE
