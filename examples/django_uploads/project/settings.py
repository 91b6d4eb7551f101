"""Settings. What differs from place to place comes from the environment, which run.py fills."""

import os
from urllib.parse import urlsplit

from relaybox.contrib.django.beat import beat_schedule

SECRET_KEY = os.environ["SECRET_KEY"]
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "project.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"
MEDIA_ROOT = os.environ["MEDIA_ROOT"]

_database = urlsplit(os.environ["DATABASE_URL"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _database.path[1:],
        "USER": _database.username,
        "PASSWORD": _database.password or "",
        "HOST": _database.hostname,
        "PORT": _database.port,
    }
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "relaybox.contrib.django",
    "uploads",
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

OUTBOX = {
    "DESTINATIONS": {
        "runner": {
            "sink": os.environ["RUNNER_URL"],
            "secret": "env:RUNNER_SECRET",
            "auth": "env:RUNNER_TOKEN",
            # Shorter than one would have it, so that a retry can be watched; as is the sweep.
            "backoff": {"base": 2, "cap": 60, "jitter": 0.1},
            # The runner is on this machine; without this line such an address is refused.
            "allow": ["127.0.0.0/8"],
        }
    },
    "ROUTES": {"file.*": ["runner"]},
    "SWEEP_INTERVAL": 2,
}
RUNNER_TOKEN = os.environ["RUNNER_TOKEN"]

CELERY_BROKER_URL = os.environ["BROKER_URL"]
CELERY_BEAT_SCHEDULE = beat_schedule(OUTBOX)
