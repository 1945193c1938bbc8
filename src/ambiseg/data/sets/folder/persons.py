"""Which images are likely of one patient: from all names of a data set together, by rules that rather find nobody.

Two eyes of one person, or the slices of one scan, must not be divided between training and test. Files often tell:
``Image_01L`` and ``Image_01R``, ``patient003_slice12`` and ``patient003_slice13``. A rule is followed only where it
groups the names consistently; counters such as ``im0001``, ``01_test`` or ``ISIC_0000001`` are images of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ambiseg._util.text import some

_SIDES = (("left", "right"), ("od", "os"), ("le", "re"), ("l", "r"))
_GAP = r"[ _./-]*"
_WITHIN = "slice|slc|sl|s|frame|f|z|t|time|timepoint|tp|w|week|visit|v|ses|session|scan|day|d|view|roi|crop|tile|patch"
_WITHIN_WORD = re.compile(_WITHIN, re.IGNORECASE)
_PATIENT_WORD = re.compile(
    "patient|pat|pt|p|person|subject|subj|sub|case|id|volunteer|participant|animal|mouse|rat", re.I
)
# Numbered things that hold many patients.
_OTHER_WORD = re.compile(
    "(data)?set|batch|fold|site|cent(er|re)|hospital|group|class|grade|stage|part|train(ing)?|test(ing)?|val(id(ation)?)?|"
    "scanner|device|camera|cam|protocol|task|year|version",
    re.I,
)
_DATE = re.compile(r"(?<!\d)(19|20)\d\d([ _.-]?\d\d([ _.-]?\d\d)?)?$")
_FEW, _SEVERAL = 3, 5  # patients that there must be: with a word that tells, and without
_MOST = 0.9  # share of the names that a rule must fit


@dataclass(frozen=True)
class Persons:
    """How patients follow from names: as the setting ``patient`` (empty for folders), and in words."""

    pattern: str
    text: str


FOLDERS = Persons("", "each folder of images is taken as one patient")


@dataclass(frozen=True)
class _Rule:
    suffix: str  # what the images of one patient differ in, at the end of a name
    accepts: Callable[[dict[str, list[str]], bool], bool]  # names of each patient; whether another rule was found first
    text: Callable[[Sequence[str]], str]  # for two names of one patient


def find_persons(names: Sequence[str]) -> Persons | None:
    """The patients that all names together suggest; ``None`` where every image is to stay on its own.

    >>> find_persons(["Image_01L", "Image_01R", "Image_02L", "Image_02R", "Image_03L"]).text
    'names that end in L and R are taken as the two sides of one patient'
    >>> find_persons(["01_test", "02_test", "03_test"]) is None
    True
    """
    names, suffixes, texts = sorted(set(names)), "", []
    found = dict(zip(names, names, strict=True))  # the patient of each name, as far as rules have found
    while (rule := next((rule for rule in _RULES if _fits(rule, found, suffixes)), None)) is not None:
        suffixes = f"(?:{rule.suffix})?{suffixes}"
        before, found = found, _patients(names, suffixes)
        texts.append(rule.text(_example(before, found)))
    return Persons(f"(.+?){suffixes}$", " and ".join(texts)) if texts else None


def _patients(names: Sequence[str], suffixes: str) -> dict[str, str]:
    pattern = re.compile(f"(.+?){suffixes}$", re.DOTALL)
    return {name: match[1] if (match := pattern.match(name)) else name for name in names}


def _fits(rule: _Rule, found: dict[str, str], suffixes: str) -> bool:
    """Whether a rule groups what was found so far, consistently and into enough patients."""
    after = _patients(list(found), f"(?:{rule.suffix})?{suffixes}")
    matched = sum(after[name] != found[name] for name in found)
    groups: dict[str, list[str]] = {}
    for name, patient in after.items():
        groups.setdefault(patient, []).append(found[name])
    if matched < _MOST * len(found) or not _FEW <= len(groups) < len(set(found.values())):
        return False
    return rule.accepts({patient: sorted(set(members)) for patient, members in groups.items()}, bool(suffixes))


def _example(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What the first patient with two images was before."""
    groups: dict[str, set[str]] = {}
    for name, patient in after.items():
        groups.setdefault(patient, set()).add(before[name])
    return sorted(next(members for members in groups.values() if len(members) > 1))[:2]


# -- sides -------------------------------------------------------------------------------------------------------------


def _side_rule(pair: tuple[str, str]) -> _Rule:
    suffix = rf"{_GAP}(?<![A-Za-z])(?i:{pair[0]}|{pair[1]})"
    side = re.compile(f"(?:{'|'.join(pair)})$", re.IGNORECASE)

    def accepts(groups: dict[str, list[str]], further: bool) -> bool:
        sides = [{found[0].lower() for name in names if (found := side.search(name))} for names in groups.values()]
        both = sum(len(one) == 2 for one in sides)
        # A letter may mean many things, unless most come in pairs.
        enough = 1 if len(pair[0]) > 1 else len(groups) / 2
        return both >= enough and all(len(names) <= 2 for names in groups.values())

    def text(example: Sequence[str]) -> str:
        ends = [found[0] if (found := side.search(name)) else name for name in example]
        return f"names that end in {' and '.join(ends)} are taken as the two sides of one patient"

    return _Rule(suffix, accepts, text)


# -- counters ----------------------------------------------------------------------------------------------------------

_COUNTER = rf"(?:[ _./-]+(?:[A-Za-z]{{1,9}}[ _.-]?)?|(?<=\d)(?i:{_WITHIN}))\(?\d+\)?"
_COUNTED = re.compile(rf"(.+?){_COUNTER}$", re.DOTALL)


def _counters(groups: dict[str, list[str]], further: bool) -> bool:
    """Whether a last number counts the images of a patient, whom what stands before it must name by a number."""
    patients = [patient.rpartition("/")[2] or patient for patient in groups]
    if sum(any(c.isdigit() for c in patient) for patient in patients) < _MOST * len(patients):
        return False  # words: classes, parts, the name of the data set
    if all(_DATE.search(patient) for patient in patients):
        return False
    before, after = {_word(patient) for patient in patients}, set()
    for patient, names in groups.items():
        after |= {_word(name[len(patient) :]) for name in names if name != patient}
    if any(_PATIENT_WORD.fullmatch(word) for word in after) or any(_OTHER_WORD.fullmatch(word) for word in before):
        return False
    within = all(_WITHIN_WORD.fullmatch(word) for word in after)
    told = within or all(_PATIENT_WORD.fullmatch(word) for word in before)
    # A second number without a word may be the patient's: 01_003_slice7.
    return len(groups) >= (_FEW if told else _SEVERAL) and (within or not further)


def _word(text: str) -> str:
    """The letters before the last number of a text."""
    found = re.findall(r"([A-Za-z]*)[ _.(-]*\d+", text)
    return found[-1] if found else ""


def _letters(groups: dict[str, list[str]], further: bool) -> bool:
    """Whether last letters count from a: 01a, 01b. Others, as in 01_h and 01_dr, may be kinds of patients."""
    several = [names for names in groups.values() if len(names) > 1]
    runs = all([name[-1].lower() for name in names] == list("abcdef"[: len(names)]) for names in several)
    return runs and len(groups) >= _SEVERAL and len(several) >= len(groups) / 2


_RULES = (
    *map(_side_rule, _SIDES),
    _Rule(
        _COUNTER,
        _counters,
        lambda names: f"names that differ in their last number ({some(names)}) are taken as images of one patient",
    ),
    _Rule(
        r"(?<=\d)[ _.-]?[a-fA-F]",
        _letters,
        lambda names: f"names that differ in their last letter ({some(names)}) are taken as images of one patient",
    ),
)
