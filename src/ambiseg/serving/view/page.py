"""The page itself: HTML, style, modules and colours, all of the package; and the policy that nothing else is loaded."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from importlib import resources
from string import Template

from ambiseg.viz.colours import BRIGHT, HEAT, OKABE_ITO, distinct, page_variables

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PACKAGE = "ambiseg.serving.view"
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_PAGE = {  # variables of this page alone: on light and on dark screens
    "--paper": ("#f6f8fa", "#0f141b"),
    "--accent": ("#2468b4", "#7db4f0"),
    "--on-accent": ("#ffffff", "#0f141b"),
    "--warn": ("#9a5b00", "#e6b04a"),
}


def static_files() -> dict[str, tuple[bytes, str]]:
    """Content and type of every file of the page but the page: no path that a client sends is ever opened.

    >>> sorted(static_files())[:3]
    ['api.js', 'cases.js', 'controls.js']
    """
    found = {}
    for file in (resources.files(_PACKAGE) / "static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _KINDS:
            found[file.name] = file.read_bytes(), _KINDS[suffix]
    return found | {"palette.css": (palette_css().encode(), _KINDS[".css"])}


def page(values: Mapping[str, str]) -> str:
    """The HTML with ``$name`` filled in; every value is escaped."""
    text = (resources.files(_PACKAGE) / "static" / "index.html").read_text(encoding="utf-8")
    return Template(text).substitute({name: html.escape(value) for name, value in values.items()})


def palette_css() -> str:
    """The colours of pages on light and on dark screens; ``data-theme`` of the root chooses one of them.

    >>> palette_css().count("--ink:")
    3
    """
    light, dark = re.findall(r":root \{ (.*?) \}", page_variables())
    light += " " + " ".join(f"{name}: {value[0]};" for name, value in _PAGE.items())
    dark += " " + " ".join(f"{name}: {value[1]};" for name, value in _PAGE.items())
    heat = f":root {{ --heat: linear-gradient(90deg, {', '.join(HEAT)}); }}"
    media = f"@media (prefers-color-scheme: dark) {{ :root[data-theme=auto] {{ {dark} }} }}"
    return f"{heat}\n:root {{ {light} }}\n{media}\n:root[data-theme=dark] {{ {dark} }}\n"


def palette() -> dict[str, list[str]]:
    """Colours that are drawn on images: of values, strata, readers, pinned masks, and masks that are decided by all
    others; no two of a kind are alike."""
    wheel = distinct(len(OKABE_ITO) + 35)[len(OKABE_ITO) :]
    found = {"heat": list(HEAT), "strata": [*BRIGHT, *wheel[12:24]], "readers": distinct(32), "pins": wheel[:12]}
    return found | {"decided": wheel[24:]}
