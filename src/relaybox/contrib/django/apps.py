"""The Django app's configuration."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.signals import setting_changed
from django.db.models.signals import pre_migrate
from django.utils.module_loading import autodiscover_modules


class RelayboxConfig(AppConfig):  # type: ignore[misc]
    """The app ``relaybox.contrib.django``, with the label ``relaybox``."""

    name = "relaybox.contrib.django"
    label = "relaybox"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks and import every app's ``outbox_handlers``."""
        from relaybox.contrib.django import checks  # noqa: F401
        from relaybox.contrib.django.conf import deliverer, forget
        from relaybox.contrib.django.tables import create_tables_without_migrations
        from relaybox.core.commands import Program

        # Messages name these commands and settings.
        Program.name, Program.migrate = "manage.py outbox", "manage.py migrate relaybox"
        Program.otherwise = ""
        Program.route = "add {!r}: ['…'] to OUTBOX['ROUTES']"
        Program.unrouted, Program.max_payload = "OUTBOX['UNROUTED'] = 'store'", "OUTBOX['MAX_PAYLOAD']"
        Program.deliverer = staticmethod(deliverer)  # type: ignore[method-assign]
        setting_changed.connect(forget, dispatch_uid="relaybox")
        pre_migrate.connect(create_tables_without_migrations, sender=self, dispatch_uid="relaybox")
        autodiscover_modules("outbox_handlers")
