"""Sphinx settings. Build with `make docs`; nothing here, and nothing in the built pages, needs a network."""

from __future__ import annotations

import re

from docutils import nodes
from latex2mathml.converter import convert

import ambiseg

project = "ambiseg"
author = "The ambiseg authors"
project_copyright = author
release = version = ambiseg.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

html_math_renderer = "mathml"  # which browsers draw by themselves: no script, no network
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
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # a list of fields; properties are documented on their own

SENTENCE = ("attribute", "data", "property")  # napoleon would read a colon in their first sentence as the end of a type
sentences: dict[str, list[str]] = {}


def as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are written for `help()`; make reStructuredText read them the way a person does.

    - An indented block under a paragraph is an equation: keep its line breaks, in a fixed-width face.
    - |x| is a size or an absolute value, not the name of a substitution.
    - What a NamedTuple says of its own fields says nothing.
    """
    plain: list[str] = []
    paragraph, equation, example = "", False, False  # the last line at the margin, and what this line is part of
    for line in lines:
        if line.strip() and not line.startswith(" "):
            paragraph, equation = line, False
        elif line.startswith("    ") and plain and not plain[-1].strip() and not (equation or example):
            equation = " " in paragraph and not paragraph.startswith(">>>")  # "Args:" and its like are one word
            plain += [".. code-block:: text", ""] if equation else []
        example = line.startswith(">>>") or (example and bool(line.strip()))
        if not (equation or example):  # odd parts of the split are inside backquotes
            parts = re.split(r"(`+[^`]*`+)", line)
            line = "".join(part if i % 2 else part.replace("|", r"\|") for i, part in enumerate(parts))
        plain.append(line)
    lines[:] = [] if plain[:1] and plain[0].startswith("Alias for field number") else plain
    if what in SENTENCE:
        sentences[name], lines[:] = lines[:], []


def put_back(app, what, name, obj, options, lines: list[str]) -> None:
    """After napoleon: the docstrings it was not to see."""
    lines[:] = sentences.pop(name, lines)


def trim(app, doctree: nodes.document) -> None:
    """Doctest needs an empty line before the closing fence of an example; a reader does not."""
    for block in doctree.findall(nodes.literal_block):
        if (text := block.astext()) != text.rstrip():
            block.rawsource = text.rstrip()
            block.clear()
            block += nodes.Text(block.rawsource)


def inline_math(writer, node: nodes.math) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(writer, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>\n')
    raise nodes.SkipNode


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # napoleon is at 500
    app.connect("autodoc-process-docstring", put_back, priority=600)
    app.connect("doctree-read", trim)
