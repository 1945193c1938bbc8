"""Write the table of all settings into docs/train.md, between its two markers, from the settings of a run; and their
keys and words into src/ambiseg/cli/settings.txt, which tab completion reads.

    python tools/settings_table.py

A test fails while the files say something else than the code.
"""

from __future__ import annotations

from pathlib import Path

from ambiseg.config import tables

PAGE = Path(__file__).resolve().parent.parent / "docs" / "train.md"
WORDS = Path(__file__).resolve().parent.parent / "src" / "ambiseg" / "cli" / "settings.txt"
BEGIN, END = "<!-- settings: tools/settings_table.py writes this -->", "<!-- end of settings -->"


def markdown() -> str:
    """One heading and one table for every section."""
    parts = []
    for table in tables():
        name, _, what = table.title.partition(": ")
        lines = [f"### `{name}`" if what else f"### {name.capitalize()}", "", _cell(what), ""]
        lines += ["| setting | default | meaning |", "|---|---|---|"]
        lines += [f"| `{row.key}` | `{row.default}` | {_cell(row.meaning)} |" for row in table.rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def words() -> str:
    """One line for every setting: its key, and the words that it may be."""
    found: dict[str, dict[str, None]] = {}  # methods may have settings of one name and different words
    for table in tables():
        for row in () if table.key == "schedule" else table.rows:
            found.setdefault(row.key, {}).update(dict.fromkeys(row.words))
    return "".join(f"{' '.join([key, *values])}\n" for key, values in found.items())


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", r"\|")


def updated(page: str) -> str:
    """The page with its table as the code has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    WORDS.write_text(words(), encoding="utf-8")
    print(f"{PAGE.name}: {sum(len(table.rows) for table in tables())} settings")
