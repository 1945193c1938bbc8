"""Write the table of all settings into docs/train.md, between its two markers, from the dataclasses of a run.

    python tools/settings_table.py

A test fails while the page says something else than the code.
"""

from __future__ import annotations

from pathlib import Path

from ambiseg.config import Config
from ambiseg.schema import tables

PAGE = Path(__file__).resolve().parent.parent / "docs" / "train.md"
BEGIN, END = "<!-- settings: tools/settings_table.py writes this -->", "<!-- end of settings -->"


def markdown() -> str:
    """One heading and one table for every section."""
    parts = []
    for section, what, rows in tables(Config):
        lines = [f"### `{section}`" if section else "### In no section", "", _cell(what), ""]
        lines += ["| setting | default | meaning |", "|---|---|---|"]
        lines += [
            f"| `{key}` | {f'`{default}`' * bool(default)} | {_cell(meaning)} |" for key, default, meaning in rows
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", r"\|")


def updated(page: str) -> str:
    """The page with its table as the code has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.name}: {sum(len(rows) for _, _, rows in tables(Config))} settings")
