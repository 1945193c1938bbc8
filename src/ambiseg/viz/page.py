"""Pages by jinja2: templates of a package, in which every value is escaped; and how numbers are written on a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ambiseg._util.text import count, percent
from ambiseg.viz.colours import page_variables

if TYPE_CHECKING:
    from markupsafe import Markup

NO_VALUE = "–"


def render(package: str | Sequence[str], template: str, **values: Any) -> str:
    """Fill a template of ``<package>/templates``, of several packages the first that has it.

    A name that has no value is an error.

    Templates also have the filters ``number``, ``share``, ``percent`` and ``count``, the macros of
    ``viz/templates/parts.html``, and ``page_variables``, the colours of :mod:`ambiseg.viz.colours` as CSS.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    packages = [package] if isinstance(package, str) else package
    loader = ChoiceLoader([PackageLoader(name, "templates") for name in (*packages, "ambiseg.viz")])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"number": number, "share": share, "percent": percent, "count": count}
    environment.globals["page_variables"] = safe(page_variables())
    return environment.get_template(template).render(values)


def safe(html: str) -> Markup:
    """Text that is HTML, CSS or SVG already, and not escaped again."""
    from markupsafe import Markup

    return Markup(html)


def number(value: float | None, digits: int = 3) -> str:
    """A number with a proper minus; a dash for what has no value.

    >>> number(-0.25, 2), number(None)
    ('−0.25', '–')
    """
    return NO_VALUE if value is None or not math.isfinite(value) else f"{value:.{digits}f}".replace("-", "−")


def share(value: float | None) -> str:
    """A share as per cent, with enough digits for small ones.

    >>> share(0.0143), share(0.00041), share(None)
    ('1.43 %', '0.041 %', '–')
    """
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return f"{100 * value:.{2 if value >= 0.001 or value == 0 else 3}f} %"
