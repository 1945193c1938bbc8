"""Networks and data sets of the user's own, named in settings as ``module:Name``."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.text import did_you_mean

FOLDERS: list[str] = []  # where modules are looked for after all of sys.path; commands add the current folder


def is_reference(text: str) -> bool:
    """Whether a text has the form ``module:Name``.

    >>> is_reference("my_package.nets:MyNet"), is_reference("C:/scans"), is_reference("unet")
    (True, False, False)
    """
    return re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", text) is not None


def imported(reference: str, setting: str) -> Callable[..., Any]:
    """The class or function ``module:Name``; where there is none, an error of one line that names ``setting``.

    >>> imported("collections:Counter", "data.name")
    <class 'collections.Counter'>
    >>> imported("os:paht", "data.name")
    Traceback (most recent call last):
    ambiseg._util.errors.ConfigError: data.name: expected os:paht, found no paht in os; did you mean path?
    """
    module, _, name = reference.partition(":")
    sys.path += [folder for folder in FOLDERS if folder not in sys.path]  # last, so that nothing is hidden by them
    try:
        with redirect_stdout(sys.stderr):  # what it prints is no result of ours
            found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{setting}: expected {reference}, found {told(error)} on importing {module}") from error
        where = f"in {', '.join(FOLDERS)} or among the installed packages" if FOLDERS else "on sys.path"
        raise ConfigError(f"{setting}: expected {reference}, found no module {error.name} {where}") from None
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{setting}: expected {reference}, found {told(error)} on importing {module}") from error
    for part in name.split("."):
        if not part or not hasattr(found, part):
            hint = did_you_mean(part, [known for known in dir(found) if not known.startswith("_")])
            raise ConfigError(f"{setting}: expected {reference}, found no {part} in {module}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{setting}: expected {reference} to be a class or a function, found {type(found).__name__}")
    return found


def parameters(factory: Callable[..., Any], without: str) -> list[str] | None:
    """The names of the arguments that can be given as options; ``None`` where any name can.

    >>> def net(in_channels, width=8): ...
    >>> parameters(net, "in_channels")
    ['width']
    """
    found = inspect.signature(factory).parameters
    if any(one.kind is one.VAR_KEYWORD for one in found.values()):
        return None
    hidden = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    return [name for name, one in found.items() if name != without and one.kind not in hidden]


def made(factory: Callable[..., Any], arguments: Mapping[str, Any], reference: str, setting: str) -> Any:
    """What the user's class or function makes of these arguments; what it raises is one line, and the cause of it."""
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{setting}: expected the arguments of {reference}, found {error}") from None
    except ValueError:  # without a signature, as some classes of extensions are
        pass
    try:
        with redirect_stdout(sys.stderr):
            return factory(**arguments)
    except (DataError, ImportError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting}: expected {reference} to be made, found {told(error)}") from error


def told(error: BaseException) -> str:
    """An error of somebody else's code in one line, with its place in the file that is nearest to the user.

    >>> try:
    ...     {}["x"]
    ... except KeyError as error:
    ...     told(error).split(" (")[0]
    "KeyError: 'x'"
    """
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "importlib" not in one.filename]
    own = [one for one in frames[1:] if "site-packages" not in one.filename] or frames
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text
