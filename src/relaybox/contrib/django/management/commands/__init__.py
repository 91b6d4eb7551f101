"""``manage.py outbox``."""
