"""Delivering in processes whose threads are greenlets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.django.conftest import ALIASES, Live
from tests.django.databases import VARIABLE
from tests.django.workers import ROOT

pytestmark = pytest.mark.processes

GREEN = """
import json, os, sys, threading
{patch}
import django
django.setup()
from django.db import connections, transaction
from relaybox.contrib.django import emit_event
from relaybox.contrib.django.drain import drain
from relaybox.contrib.django.models import OutboxEvent
from tests.django.eager import eager, handled_by
from tests.django.shop.models import Order

using, threads, ours = sys.argv[1], [], []

def handle(event):
    assert Order.objects.using(using).filter(pk=event.aggregate_id).exists()
    threads.append(threading.get_native_id())
    ours.append(connections[using])

def place():
    with transaction.atomic(using=using):
        order = Order.objects.using(using).create(total=1)
        emit_event("order", order.pk, "order.placed", {{}}, using=using)

with handled_by(handle):
    with eager():
        place()
        {spawn}
    with transaction.atomic(using=using):
        inside = drain(using).finished
statuses = list(OutboxEvent.objects.using(using).values_list("status", flat=True))
print(json.dumps([statuses, len(threads), threading.get_native_id() in threads,
                  connections[using] in ours, inside]))
"""
HUBS = {
    "gevent": (
        "import gevent, gevent.monkey; gevent.monkey.patch_all()",
        "gevent.joinall([gevent.spawn(place) for _ in range(3)], raise_error=True)",
    ),
    "eventlet": (
        "import eventlet; eventlet.monkey_patch()",
        "[thread.wait() for thread in [eventlet.spawn(place) for _ in range(3)]]",
    ),
}


@pytest.mark.parametrize("hub", HUBS)
def test_among_greenlets_a_real_thread_delivers(live: Live, hub: str) -> None:
    patch, spawn = HUBS[hub]
    environment = {
        **os.environ,
        VARIABLE: json.dumps(dict.fromkeys(ALIASES, live.url)),
        "PYTHONWARNINGS": "ignore",
        "DJANGO_SETTINGS_MODULE": "tests.django.project.settings",
    }
    done = subprocess.run(
        [sys.executable, "-c", GREEN.format(patch=patch, spawn=spawn), live.using],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, calls, in_hub, shared, inside = json.loads(done.stdout)
    assert (found, calls) == (["delivered"] * 4, 4)
    assert (in_hub, shared, inside) == (False, False, False)
