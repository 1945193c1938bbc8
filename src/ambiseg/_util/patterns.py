"""Regular expressions of somebody else's: found in bounded time, since a few characters of one can take years."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence

from ambiseg._util.errors import DataError
from ambiseg._util.parsing import shown

LONGEST = 1000  # characters of an expression
SECONDS = 15.0  # for all texts together
# A group that is repeated, a reference to one, or several repetitions may go back and forth without end. What is left
# takes at most the square of a name's length.
_REPEATED = re.compile(r"\)[*+?{]|\\[1-9]|\(\?[P(]")
_MATCH = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
pattern, texts = json.load(sys.stdin)
found = (re.search(pattern, text) for text in texts)
json.dump([one and (one[1] if one.re.groups and one[1] else one[0]) for one in found], sys.stdout)
"""


def check_pattern(pattern: str) -> None:
    """``ValueError`` unless it is a regular expression."""
    if len(pattern) > LONGEST:
        raise ValueError(f"expected a regular expression of at most {LONGEST:,} characters, found {len(pattern):,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may mean something else in a later Python
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        said = error if isinstance(error, re.error) else "too deep, or too many repetitions"
        raise ValueError(f"expected a regular expression, found {shown(pattern)} ({said})") from None


def first_groups(pattern: str, texts: Sequence[str]) -> list[str | None]:
    """In each text, the first group of the first match, or else the whole match; ``None`` where there is none.

    An expression that might not end is tried in a process of its own; :class:`DataError` if that takes too long.

    >>> first_groups(r"p(\\d+)", ["p12_a", "q"]), first_groups("(?:a|b)+", ["xaba"])
    (['12', None], ['aba'])
    """
    if len(re.findall(r"[*+{]", pattern)) <= 1 and pattern.count("?") <= 2 and not _REPEATED.search(pattern):
        found = (re.search(pattern, text) for text in texts)
        return [one and (one[1] if one.re.groups and one[1] else one[0]) for one in found]
    command = [sys.executable, "-I", "-S", "-c", _MATCH]
    try:
        done = subprocess.run(
            command, input=json.dumps([pattern, list(texts)]).encode(), capture_output=True, timeout=SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        message = f"expected a regular expression that is found within {SECONDS:g} seconds, found {shown(pattern)}"
        raise DataError(f"{message}, which takes longer") from None
    except subprocess.CalledProcessError:
        raise DataError(f"expected a regular expression, found {shown(pattern)}, which ends in an error") from None
    return json.loads(done.stdout)
