"""Settings: the defaults of Relaybox, and the fastest ones of the other outbox."""

from __future__ import annotations

import os

from tests.django.databases import database

SECRET_KEY = "of no use to anybody"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "benchmarks.django_project.urls"
DATABASES = {"default": database(os.environ["RELAYBOX_BENCH_DATABASE"])}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
STATIC_URL = "static/"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django_outbox_pattern",
    "relaybox.contrib.django",
    "benchmarks.django_project",
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

CELERY_BROKER_URL = os.environ["RELAYBOX_BENCH_BROKER"]
CELERY_TIMEZONE = "UTC"

OUTBOX = {"DISPATCH": "celery", "DRAIN_SECONDS": "10m"}
DJANGO_OUTBOX_PATTERN = {
    "DEFAULT_CONNECTION_CLASS": "benchmarks.django_project.connection.Receiver",
    "DEFAULT_PRODUCER_WAITING_TIME": 0,
}
