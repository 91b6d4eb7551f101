"""The model that an application writes."""

from __future__ import annotations

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models


class Note(models.Model):
    """A minimal model."""

    name = models.CharField(max_length=100)
    data = models.JSONField(encoder=DjangoJSONEncoder)
