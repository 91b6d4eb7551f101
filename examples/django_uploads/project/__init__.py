"""The project: its settings, its addresses and its Celery application."""

from .celery import app as celery_app

__all__ = ["celery_app"]
