"""Settings of the small project."""

from __future__ import annotations

import os

from relaybox.contrib.django.beat import beat_schedule
from tests.django.databases import databases

SECRET_KEY = "of no use to anybody"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.django.project.urls"
DATABASES = databases(os.environ)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
STATIC_URL = "static/"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_celery_beat",
    "relaybox.contrib.django",
    "tests.django.catalog",
    "tests.django.shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

CELERY_BROKER_URL = os.environ.get("RELAYBOX_TEST_BROKER", "memory://")
CELERY_TIMEZONE = "UTC"

OUTBOX = {
    "DATABASES": [alias for alias, given in DATABASES.items() if given] or ["default"],
    "DESTINATIONS": {"runner": {"sink": "http://127.0.0.1:9/events", "allow": ["127.0.0.0/8"]}},
    "ROUTES": {"file.*": ["runner"]},
    "HANDLERS": {"order.refunded": "tests.django.shop.refunds.refund"},
    "SWEEP_INTERVAL": os.environ.get("RELAYBOX_TEST_SWEEP", "60s"),
}
CELERY_BEAT_SCHEDULE = beat_schedule(OUTBOX)
