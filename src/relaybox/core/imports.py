"""Import objects by their name, ``module:name``, and explain why an import failed."""

from __future__ import annotations

import difflib
import importlib
import traceback
from pathlib import Path
from typing import Any

from relaybox.errors import ConfigError, MissingExtra

_OURS = str(Path(__file__).parents[1])
_IMPORT = "<frozen importlib"


def load(path: str, setting: str, fix: str) -> Any:
    """Return what ``module:name`` names; the name may have dots.

    ``ConfigError`` starts with ``setting`` and ends with ``fix``, or with the error that the module raised.
    """
    module, _, names = path.partition(":")
    if not module or not names:
        raise ConfigError(f"{setting}: it is not module:name; {fix}")
    found = _module(module, setting, fix)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            close = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; {fix}"
            raise ConfigError(f"{setting}: {module} has no {name!r}{hint}") from None
    return found


def import_extra(path: str, package: str, extra: str) -> Any:
    """Import our own ``module:name``. Raise ``MissingExtra`` if the package that it needs is missing."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "relaybox":
            raise
        raise MissingExtra(package, extra) from None


def error_with_line(error: BaseException) -> str:
    """Return an error with the user's line: ``NameError: name 'x' is not defined (shop.py, line 3)``."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((_OURS, _IMPORT))]
    # A SyntaxError names the line itself, and nothing of that file was run.
    if not theirs or isinstance(error, SyntaxError):
        return text
    return f"{text} ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})"


def _module(name: str, setting: str, fix: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            where = f"there is no module {error.name!r} in {Path.cwd()} or among the installed packages"
            raise ConfigError(f"{setting}: {where}; {fix}") from None
        raise ConfigError(f"{setting}: {name} cannot be imported: {error_with_line(error)}") from error
