"""Which cases are for training and which for testing: splits by patient, saved to a file, and a check for leakage."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ambiseg._util.errors import DataError
from ambiseg._util.files import write_text
from ambiseg._util.parsing import decoded, parse_json, shown
from ambiseg._util.reading import Unreadable, read_bytes
from ambiseg._util.text import some
from ambiseg.data.case import Cases, Progress
from ambiseg.data.rules import FEW, SHARES, Rule, uniform
from ambiseg.settings import explain

_FORMAT = "ambiseg.Split/1"
_OPTIONAL = ("released", "ranked", "fold", "assumed", "digests")  # in a file only where they say something
EACH_ITS_OWN = '"patient": ".+" in ambiseg.json keeps each image on its own'


class LeakageError(DataError):
    """Something is in two parts of a split that must be in one."""


class EmptyPart(DataError):
    """A part of a split would have no patient; ``seed`` is one that fills all parts, ``None`` if none was found.

    ``option`` is how the seed is given, so that a message names what was typed: :meth:`naming`.
    """

    def __init__(self, problem: str, seed: int | None, option: str = "seed={}") -> None:
        advice = "take fewer parts" if seed is None else f"{option.format(seed)} fills all parts"
        super().__init__(f"{problem}; {advice}, or take a larger fraction")
        self.problem, self.seed = problem, seed

    def naming(self, option: str) -> EmptyPart:
        return EmptyPart(self.problem, self.seed, option)


@dataclass(frozen=True)
class Split:
    """Named parts of a data set, saved together with a fingerprint of the data.

    Made by :meth:`by_hash`, :meth:`declared` or :meth:`by_patient`. A split that divides a patient, has an empty part
    or has a case in two parts is an error.

    Args:
        parts: case names of each part. They are kept sorted, so that the order of the data set does not matter.
        fingerprint: :func:`fingerprint` of the data that was split.
        rule: how it was made, and where cases that are added later go; ``print(split.rule)`` says it in words.
        digests: the digest of each case by name, from which some cases can be verified without reading all; ``None``
            for splits that were saved before there were any.

    >>> from ambiseg.data.sets.shapes import Shapes
    >>> split = Split.by_hash(Shapes(count=100), {"train": 0.8, "test": 0.2})
    >>> print(split)
    train 78, test 22 (by hash of the patient with seed 0: train 80%, test 20%)
    """

    parts: Mapping[str, Sequence[str]]
    fingerprint: str
    rule: Rule
    digests: Mapping[str, str] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", {part: tuple(sorted(names)) for part, names in self.parts.items()})
        where: dict[str, str] = {}
        for part, names in self.parts.items():
            if not names:
                raise DataError(f"part {part!r} of the split has no case")
            for name in names:
                if name in where:
                    raise LeakageError(f"case {name!r} is in the split twice, in {where[name]} and in {part}")
                where[name] = part
        if self.digests is not None and self.digests.keys() != where.keys():
            raise DataError(f"digests: expected one per case, found {len(self.digests)} for {len(where)} cases")

    def __str__(self) -> str:
        return f"{', '.join(f'{part} {len(names)}' for part, names in self.parts.items())} ({self.rule})"

    @staticmethod
    def by_hash(
        cases: Cases,
        fractions: Mapping[str, float] | None = None,
        seed: int = 0,
        progress: Progress | None = None,
        fold: str | None = None,
    ) -> Split:
        """Each patient where its hash says: see :class:`~ambiseg.data.rules.Rule`. Added cases never move the others,
        and a patient who is in two data sets is in the same part of both. By default train has 70%, val 10%, test 20%;
        a share is met on average, with a standard deviation of √(p (1 − p) / patients). Fewer than 50 patients are
        divided by the rank of their hash instead, which meets the shares exactly. All data are read, for the
        fingerprint.

        With ``fold``, such as ``"2/5"``, the test part is the second of five folds, which together hold every patient
        once; the others are divided into train and val as ``fractions`` say.
        """
        if not cases.patients_known:
            raise DataError(f"{cases.title}: a split by hash needs patients, and the source did not tell who is who")
        fractions = SHARES if fractions is None else fractions
        rule = Rule(fractions, seed) if fold is None else Rule.of_fold(fold, fractions, seed)
        return Split.by_patient(cases, {}, rule, progress)

    @staticmethod
    def by_patient(
        cases: Cases,
        part_of: Mapping[str, str],
        rule: Rule,
        progress: Progress | None = None,
        digests: Sequence[str] | None = None,
    ) -> Split:
        """The part that ``part_of`` has for a patient, for others the one that ``rule`` says; the rule is saved too.
        ``digests`` of all cases, where they are known."""
        _numbers(cases)
        owner = (cases.declared if rule.declared else None) or [None] * len(cases)
        divided = {p for p, part in zip(cases.patients, owner, strict=True) if part in (None, "train")}
        if not part_of and rule.fractions and not rule.fold and not rule.released:
            rule = replace(rule, ranked=len(divided) < FEW)
        rule = replace(rule, assumed=cases.patients_assumed)
        if not part_of and rule.ranked and len(divided) < len(rule.fractions):
            raise DataError(
                f"{cases.title}: expected at least {len(rule.fractions)} patients, one for each of "
                f"{', '.join(rule.fractions)}, found {_few(cases, divided)}"
            )

        def places(rule: Rule) -> list[str]:
            try:
                fresh = rule.divide(divided) if not part_of and rule.fractions else {}
            except DataError as error:  # a fold
                raise DataError(f"{cases.title}: {error}") from None
            return [
                part_of.get(p) or (fresh.get(p) if part in (None, "train") else "") or rule.part(p, part)
                for p, part in zip(cases.patients, owner, strict=True)
            ]

        parts: dict[str, list[str]] = {part: [] for part in rule.fractions}
        for name, part in zip(cases.names, places(rule), strict=True):
            parts.setdefault(part, []).append(name)
        if empty := [part for part, names in parts.items() if not names]:
            fits = (seed for seed in range(100) if parts.keys() <= set(places(replace(rule, seed=seed))))
            problem = f"{cases.title}: part {empty[0]!r} would be empty: a fraction of {rule.fractions[empty[0]]:g} of"
            raise EmptyPart(f"{problem} {len(set(cases.patients))} patients", next(fits, None))
        split = Split(parts, "", rule)
        check_leakage(cases, split, content=False)  # before anything is read
        digests = _digests(cases, progress) if digests is None else digests
        return replace(split, fingerprint=combine(digests), digests=dict(zip(cases.names, digests, strict=True)))

    @staticmethod
    def declared(
        cases: Cases,
        val: float | None = None,
        seed: int = 0,
        progress: Progress | None = None,
        test: float | None = None,
    ) -> Split:
        """The parts that the data's owner gave. With ``val`` or ``test``, that fraction of the patients in ``train`` is
        taken out by hash to be that part, for data that come without one."""
        said = cases.declared
        without = [name for name, part in zip(cases.names, said or [""] * len(cases), strict=True) if not part]
        if said is None or without:
            raise DataError(
                f"{cases.title}: expected every case to have a declared split, "
                f"found {len(without)} of {len(cases)} without one: {_names(without)}"
            )
        shares = {part: share for part, share in (("val", val), ("test", test)) if share is not None}
        for part, share in shares.items():
            if part in said or "train" not in said:
                raise DataError(
                    f"{cases.title}: {part}={share:g} needs declared parts with a train and without a {part}, "
                    f"found {', '.join(sorted(set(said)))}"
                )
            if not 0 < share < 1:
                raise DataError(f"{part} must be a fraction of train between 0 and 1, found {share:g}")
        fractions = {"train": 1 - sum(shares.values()), **shares} if shares else {}
        return Split.by_patient(cases, {}, Rule(fractions, seed, declared=True), progress)

    def extended(self, cases: Cases, progress: Progress | None = None) -> Split:
        """This split with the cases that were added to the data since. Nobody moves: cases of a patient who is in the
        split join that patient, others go where the rule says. What was split before must still be there, unchanged.
        """
        places = self._places(cases)
        digests = _digests(cases, progress)
        self._compare(cases, combine(digests[i] for indices in places.values() for i in indices))
        part_of = {cases.patients[i]: part for part, indices in places.items() for i in indices}
        return Split.by_patient(cases, part_of, self.rule, digests=digests)

    def indices(self, cases: Cases, part: str) -> list[int]:
        """Numbers of one part's cases, in the order of their names: the same cases however the data are ordered."""
        if part not in self.parts:
            raise DataError(f"part must be one of {', '.join(self.parts)}, found {part!r}")
        return self._places(cases)[part]

    def verify(self, cases: Cases, names: Collection[str] | None = None, progress: Progress | None = None) -> None:
        """Raise :class:`DataError` unless ``cases`` are what was split: the same names and the same content.

        Cases are read, except those of a :class:`~ambiseg.data.store.Store`, whose digests are known. With ``names``,
        only these cases are read and compared; a split that was saved without digests then compares no content.
        """
        self._places(cases, exactly=True)
        if names is None or cases.fingerprint is not None:
            self._compare(cases, cases.fingerprint or fingerprint(cases, progress))
        elif self.digests is not None:
            number = _numbers(cases)
            for name in names:
                if (found := cases.digest(number[name])) != self.digests[name]:
                    raise DataError(
                        f"{cases.title}: case {name!r} has another content than when the data were split (pixels, "
                        f"masks, readers or patient): expected digest {self.digests[name]}, found {found}"
                        f"{self._assumed(cases)}"
                    )

    def _compare(self, cases: Cases, found: str) -> None:
        if found != self.fingerprint:
            raise DataError(
                f"{cases.title}: the cases have the names of the split but another content (pixels, masks, readers or "
                f"patients): expected fingerprint {self.fingerprint}, found {found}{self._assumed(cases)}"
            )

    def _assumed(self, cases: Cases) -> str:
        """For an error: what is now assumed of the patients and was not when the data were split, and how to set it."""
        now, then = cases.patients_assumed, self.rule.assumed
        if now == then:
            return ""
        if now:
            return f"; {now}, which the split was made without: {EACH_ITS_OWN}"
        return f"; the split was made with another setting of patient: {then}"

    def _places(self, cases: Cases, exactly: bool = False) -> dict[str, list[int]]:
        """Numbers of the cases of every part; ``exactly``: there are no other cases."""
        number, split = _numbers(cases), {name for names in self.parts.values() for name in names}
        missing, added = sorted(split - number.keys()), sorted(number.keys() - split) if exactly else []
        if missing or added:
            found = [f"{len(missing)} missing: {_names(missing)}"] * bool(missing)
            found += [f"{len(added)} new: {_names(added)} (`Split.extended` adds them)"] * bool(added)
            raise DataError(f"{cases.title}: expected the {len(split)} cases of the split, found {'; '.join(found)}")
        return {part: [number[name] for name in names] for part, names in self.parts.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, one case per line. The file appears whole or not at all."""
        content = {"format": _FORMAT, "made": str(self.rule), **asdict(self.rule), "fingerprint": self.fingerprint}
        content |= {"parts": self.parts, "digests": self.digests}
        content = {key: value for key, value in content.items() if value or key not in _OPTIONAL}
        write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Split:
        """Read what :meth:`save` wrote; :class:`DataError` for anything else."""
        content = None
        try:
            content = parse_json(decoded(read_bytes(path)))
            if not isinstance(content, dict):
                raise DataError(f"expected an object, found {shown(content)}")
            file = _File.model_validate(content)
            rule = Rule(**{each.name: getattr(file, each.name) for each in fields(Rule)})
            return Split(file.parts, file.fingerprint, rule, file.digests)
        except LeakageError as error:
            raise LeakageError(f"{os.fspath(path)}: {error}") from None
        except Unreadable:
            raise
        except ValueError as error:  # Mistake, pydantic's and DataError are all of them
            reason = explain(error, _File, content) if isinstance(error, ValidationError) else error
            raise DataError(f"{os.fspath(path)}: cannot be read as a split: {reason}") from None


class _File(BaseModel):
    """The content of a split's file; ``made`` is the rule in words."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["ambiseg.Split/1"]
    made: str
    fractions: dict[str, float]
    seed: int
    declared: bool
    released: str = ""
    ranked: bool = False
    fold: str = ""
    assumed: str = ""
    fingerprint: str
    parts: dict[str, list[str]]
    digests: dict[str, str] | None = None


def fingerprint(cases: Cases, progress: Progress | None = None) -> str:
    """32 hexadecimal digits that change with any pixel, mask, reader, patient or name, and not with the order of the
    cases, which are all read."""
    return combine(_digests(cases, progress))


def check_leakage(cases: Cases, split: Split, content: bool = True, progress: Progress | None = None) -> None:
    """Raise :class:`LeakageError` when a patient, or the pixels of an image, are in two parts.

    With ``content`` every image is read and pixels are compared, byte for byte: this finds the same picture under
    another name and another patient, and not a picture that was compressed or resized again.

    >>> from ambiseg.data.sets.shapes import Shapes
    >>> cases = Shapes(count=64)
    >>> check_leakage(cases, Split.by_hash(cases))  # raises nothing
    """
    places = [(part, i) for part, indices in split._places(cases).items() for i in indices]

    def refuse_shared(kind: str, key: Callable[[int], str], progress: Progress | None = None) -> None:
        seen: dict[str, dict[str, str]] = defaultdict(dict)  # the first case of each part
        for done, (part, i) in enumerate(places, 1):
            seen[key(i)].setdefault(part, cases.names[i])
            if progress:
                progress(done, len(places))
        if shared := [key for key, parts in seen.items() if len(parts) > 1]:
            what = f"patient {shared[0]!r}" if kind == "patient" else "the same image"
            where = " and ".join(f"{part} (case {name!r})" for part, name in seen[shared[0]].items())
            more = f"; in all {len(shared)} {kind}s are in two parts" if len(shared) > 1 else ""
            raise LeakageError(f"{cases.title}: {what} is in {where}{more}{split._assumed(cases)}")

    refuse_shared("patient", lambda i: cases.patients[i])
    if content:
        refuse_shared("image", cases.image_digest, progress)


def subset(cases: Cases, indices: Iterable[int], fraction: float, seed: int = 0) -> list[int]:
    """Part of a training set, to see what more data are worth: ⌊n · fraction + ½⌋ of the n ``indices``, in their order.

    Whole patients are taken, in the order of their hash, because a smaller study has fewer patients and not fewer
    images of each; only the last may be cut, so that the number of cases is exact. Subsets of one seed are nested:
    a quarter is in the half.

    >>> from ambiseg.data.sets.shapes import Shapes
    >>> cases = Shapes(count=32)
    >>> half, quarter = (subset(cases, range(20), fraction) for fraction in (1 / 2, 1 / 4))
    >>> len(half), len(quarter), set(quarter) <= set(half)
    (10, 5, True)
    """
    indices = list(indices)
    count = math.floor(len(indices) * fraction + 0.5)
    if not (0 < fraction <= 1 and count):
        raise DataError(
            f"a subset needs a fraction in (0, 1] of at least one case, found {fraction:g} of {len(indices)} cases"
        )

    def rank(i: int) -> tuple[float, str, float]:
        patient = cases.patients[i]
        return uniform(f"subset:{seed}:{patient}"), patient, uniform(f"subset:{seed}:{cases.names[i]}")

    chosen = set(sorted(indices, key=rank)[:count])
    return [i for i in indices if i in chosen]


def _digests(cases: Cases, progress: Progress | None) -> list[str]:
    digests = []
    for i in range(len(cases)):
        digests.append(cases.digest(i))
        if progress:
            progress(i + 1, len(cases))
    return digests


def combine(digests: Iterable[str]) -> str:
    """The fingerprint of cases with these digests."""
    return hashlib.blake2b("\n".join(sorted(digests)).encode(), digest_size=16).hexdigest()


def _numbers(cases: Cases) -> dict[str, int]:
    number = {name: i for i, name in enumerate(cases.names)}
    if len(number) < len(cases):
        twice = [name for i, name in enumerate(cases.names) if number[name] != i]
        raise DataError(f"{cases.title}: expected every case to have a name of its own, found twice: {_names(twice)}")
    return number


def _few(cases: Cases, patients: Collection[str]) -> str:
    found = f"{len(patients)} ({_names(sorted(patients))})"
    return f"{found}: {cases.patients_assumed}; {EACH_ITS_OWN}" if cases.patients_assumed else found


def _names(names: Sequence[str]) -> str:
    return some([repr(name) for name in names], 3)
