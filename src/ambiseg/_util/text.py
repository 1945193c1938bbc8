"""Words for messages: counts, lists, suggestions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def did_you_mean(found: str, known: Iterable[str], before: str = "") -> str:
    """``; did you mean X?`` where one of the known names is close, else an empty text.

    >>> did_you_mean("epoch", ["epochs", "samples"]), did_you_mean("zzz", ["epochs"])
    ('; did you mean epochs?', '')
    """
    close = get_close_matches(found, list(known), 1)
    return f"; did you mean {before}{close[0]}?" if close else ""


def did_you_mean_key(found: str, known: Sequence[str], before: str = "") -> str:
    """The same for keys with dots: those whose last part was found, else the nearest.

    >>> did_you_mean_key("samples", ["model.samples", "evaluation.samples"], "--")
    '; did you mean --model.samples or --evaluation.samples?'
    >>> did_you_mean_key("trainer.epoch", ["trainer.epochs"])
    '; did you mean trainer.epochs?'
    """
    ends = keys_ending(found, known)
    return (
        f"; did you mean {' or '.join(before + key for key in ends)}?" if ends else did_you_mean(found, known, before)
    )


def keys_ending(last: str, known: Iterable[str]) -> list[str]:
    """Keys whose last part is ``last``; of these only the shortest, since deeper ones belong to tables in settings.

    >>> keys_ending("epochs", ["trainer.epochs", "model.capacity.epochs", "seed"])
    ['trainer.epochs']
    """
    ends = [key for key in known if "." in key and key.rpartition(".")[2] == last]
    return [key for key in ends if key.count(".") == min(one.count(".") for one in ends)]


def printable(text: str) -> str:
    r"""A text of somebody else's, such as a file's name, as one line without control characters.

    >>> printable("a\nb\x1b[2J"), printable("é ± 1")
    ('a\\nb\\x1b[2J', 'é ± 1')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def shape_text(shape: Sequence[int]) -> str:
    """``(64, 32)`` -> ``64×32``."""
    return "×".join(map(str, shape))


def some(items: Sequence[object], most: int = 5, joint: str = ", ") -> str:
    """The first few, and how many more there are.

    >>> some([1, 2, 3, 4], most=2)
    '1, 2 and 2 more'
    """
    shown = joint.join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 mask``, ``2 masks``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def percent(share: float) -> str:
    """``42 %``, ``4.2 %``, ``< 0.1 %``, ``0 %``.

    >>> percent(0.424), percent(0.042), percent(0.0001), percent(0)
    ('42 %', '4.2 %', '< 0.1 %', '0 %')
    """
    if share == 0 or share >= 0.0995:
        return f"{100 * share:.0f} %"
    return "< 0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
