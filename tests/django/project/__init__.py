"""A small project that the tests run, in their own process and in others."""

from tests.django.project.celery import app as celery_app

__all__ = ["celery_app"]
