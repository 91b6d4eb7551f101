"""A Django project made of a document: what its blocks are for is in the word behind ``python``.

``python shop/models.py``: the block belongs to that file of a project; several of one file are joined.
``python shell``: the block is typed into ``manage.py shell`` of that project, those of one document in order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FENCE = re.compile(r"^```python(?: ([^\n]+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w/]+\.py")
SECRET = re.compile(r'"env:(\w+)"')

# What a new project has before its author writes anything.
SETTINGS = """
import os

SECRET_KEY = "of no use to anybody"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {databases!r}
CELERY_BROKER_URL = "memory://"
CELERY_TIMEZONE = "UTC"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "OPTIONS": {{
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        }},
    }}
]
"""
APPS = """
_apps = ["admin", "auth", "contenttypes", "messages", "sessions"]
INSTALLED_APPS = [*(f"django.contrib.{app}" for app in _apps), *INSTALLED_APPS]
"""
SHELL = """
import importlib

import django
from django.core.management import call_command
django.setup()
call_command("makemigrations", verbosity=0)
for alias in {aliases!r}:
    call_command("migrate", database=alias, verbosity=0)
call_command("check", databases={aliases!r})
for module in {modules!r}:
    importlib.import_module(module)
namespace = {{"__name__": "__main__"}}
for lines, code in {blocks!r}:
    exec(compile("\\n" * lines + code, {document!r}, "exec"), namespace)
"""


def is_project(document: Path) -> bool:
    """True if the document has blocks of a project."""
    return any(FILE.fullmatch(word) for word, _ in FENCE.findall(document.read_text()))


class Project:
    """The project of a document, in a directory of its own."""

    def __init__(self, document: Path, place: Path, databases: dict[str, dict[str, object]]) -> None:
        self._place = place
        text = document.read_text()
        self._secrets = dict.fromkeys(SECRET.findall(text), "whsec_" + "c2VjcmV0" * 4)
        self._write("project/settings.py", SETTINGS.format(databases=databases))
        for word, _ in FENCE.findall(text):
            if FILE.fullmatch(word):
                self._write(f"{Path(word).parent}/__init__.py", "")
            if Path(word).name == "models.py":
                self._write(f"{Path(word).parent}/migrations/__init__.py", "")
        blocks: list[tuple[int, str]] = []
        modules: list[str] = []
        for block in FENCE.finditer(text):
            word, code = block[1] or "", block[2]
            if FILE.fullmatch(word):
                self._write(word, code)
                modules.append(word.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            elif word == "shell":
                # Blank lines ahead make a traceback show the line of the document.
                blocks.append((text.count("\n", 0, block.start(2)), code))
        self._write("project/settings.py", APPS)
        shell = SHELL.format(aliases=list(databases), blocks=blocks, modules=modules, document=str(document))
        self._write("shell.py", shell)

    def run(self) -> subprocess.CompletedProcess[str]:
        """Set Django up, make the tables and type the blocks of the shell."""
        return subprocess.run(
            [sys.executable, "-W", "error", "shell.py"],
            cwd=self._place,
            env={**os.environ, **self._secrets, "DJANGO_SETTINGS_MODULE": "project.settings"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )

    def _write(self, name: str, text: str) -> None:
        path = self._place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text + "\n")
