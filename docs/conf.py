"""Sphinx settings. Build with `make docs`; nothing here, and nothing in the built pages, needs a network."""

from __future__ import annotations

import re

import ambiseg

project = "ambiseg"
author = "The ambiseg authors"
project_copyright = author
release = version = ambiseg.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"ambiseg {release}"
html_static_path = ["_static"]
html_css_files = ["ambiseg.css"]
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"
highlight_language = "python"
trim_doctest_flags = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torchmetrics' texts about overriding `update` are not about ours
autodoc_type_aliases = {
    "Masks": "ambiseg.masks.Masks",
    "Absent": "ambiseg.overlap.Absent",
    "Cost": "ambiseg.overlap.Cost",
}
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # a list of fields; properties are documented on their own


def as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are written for `help()`; make reStructuredText read them the way a person does.

    - An indented block under a paragraph is an equation: keep its line breaks, in a fixed-width face.
    - |x| is a size or an absolute value, not the name of a substitution.
    - The first line of an attribute or a property is a sentence, even if it holds a colon. Napoleon would take what is
      before the colon for a type; it does not look past an empty line.
    - What a NamedTuple says of its own fields says nothing.
    """
    if what in ("attribute", "data", "property") and lines:
        lines[:] = [] if lines[0].startswith("Alias for field number") else ["", *lines]
    plain: list[str] = []
    equation = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and plain and not equation:
            above = next((x for x in reversed(plain) if x.strip()), "")
            if not plain[-1].strip() and above and not above.startswith((" ", ">>>", "...")):
                plain += [".. code-block:: text", ""]
                equation = True
        elif line.strip() and not indented:
            equation = False
        if not equation and not line.lstrip().startswith((">>>", "...")):
            line = "".join(  # odd parts of the split are inside backquotes
                part if i % 2 else part.replace("|", r"\|") for i, part in enumerate(re.split(r"(`+[^`]*`+)", line))
            )
        plain.append(line)
    lines[:] = plain


def setup(app) -> None:
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon, which is at 500
