"""An evaluation as text: the verdict, what it is compared with, all averages, and what they mean."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ambiseg._util.tables import table
from ambiseg._util.text import count, percent, some
from ambiseg.cli.decided import show_decided

if TYPE_CHECKING:
    from rich.console import Console

    from ambiseg.evaluation.looking import Looking
    from ambiseg.evaluation.results import Evaluation, Modes, SettingScores, Strata

TITLES: dict[str, str] = {
    "ged": "GED",
    "ged_unbiased": "GED unbiased",
    "ged_unbiased_both": "  on both sides",
    "matched_iou": "matched IoU",
    "ece": "ECE",
    "diversity": "diversity",
    "entropy": "entropy",
    "empty_mass": "empty mass",
}
MEANINGS: dict[str, str] = {
    "GED": "distance between the predicted and the drawn masks; 0 is best",
    "GED unbiased": "without what the number of masks adds; on both sides: of masks and of {annotator}s",
    "matched IoU": "overlap of predicted and drawn masks, paired as well as possible; 1 is best",
    "ECE": "how far predicted probabilities of pixels are from the share of {annotator}s; 0 is best",
    "diversity": "how much two predicted masks differ (1 − IoU); best as that of the {annotator}s",
    "entropy": "how uncertain a pixel is, in nats; best as that of the {annotator}s",
    "empty mass": "probability of a mask that marks nothing; best as the share of such {annotator}s",
}
_BAR = 16  # characters


def show(found: Evaluation, console: Console) -> None:
    """Print an evaluation: the verdict, the anchors, averages, then by how many drew anything, strata, known modes."""
    weights = "" if found.which == "files" else f", {found.which} weights"
    weights += f", mean of {found.symmetries} symmetries" if found.symmetries > 1 else ""
    sizes = f"{count(found.images, 'image')} of {count(found.patients, found.unit)}"
    title = f"{found.run}: {found.split} of {found.data}, {sizes}, protocol {found.protocol}{weights}"
    console.print(title, style="bold", soft_wrap=True)
    if found.unpredicted:
        of = count(found.images + found.unpredicted, "case")
        console.print(f"scored {found.images:,} of {of}; the others have no prediction", soft_wrap=True)
    if found.folds is not None:
        console.print(str(found.folds), soft_wrap=True)
        if found.folds.differing:
            console.print(f"settings that differ between the runs: {some(found.folds.differing, 8)}", soft_wrap=True)
    _show_region(found, console)
    console.print()
    if found.anchors:
        _show_anchors(found, console)
    _show_averages(found, console)
    if found.looking is not None:
        _show_looking(found.looking, found.annotator, console)
    _show_buckets(found, console)
    if found.strata is not None:
        _show_strata(found.strata, found.annotator, console)
    if found.decided is not None:
        show_decided(found, console)
    if found.modes is not None:
        _show_modes(found.modes, found.strata, console)


def _show_region(found: Evaluation, console: Console) -> None:
    if found.region is None:
        return
    console.print(f"scored: {found.region.text}")
    if found.region.kind == "middle":
        remedy = "evaluate with --whole to score whole images, or train with --data.eval_size null"
        _wrapped(f"warning: what lies outside of the middle is not scored; {remedy}", console)


def _show_anchors(found: Evaluation, console: Console) -> None:
    """The model and the anchors on one scale, the best first."""
    setting = _headline(found)
    _wrapped(found.verdict, console)
    console.print()
    anchors = [one for one in found.anchors if one.samples in (None, setting.samples)]
    lines = [(one.title, one.ged, one.matched_iou) for one in anchors]
    lines.append(("▶ this prediction" if found.which == "files" else "▶ this model", setting.metrics["ged"],
                  setting.metrics["matched_iou"]))  # fmt: skip
    lines.sort(key=lambda line: float("inf") if line[1].mean is None else line[1].mean)
    longest = max(ged.mean or 0 for _, ged, _ in lines) or 1.0
    rows = [
        [name, ged.text, "█" * max(0, round(_BAR * (ged.mean or 0) / longest)), _number(iou and iou.mean)]
        for name, ged, iou in lines
    ]
    masks = f"{setting.samples} masks, {setting.form} form"
    console.print(f"beside others on the same images ({masks}); a small GED is good", style="bold")
    console.print(table(["", "GED", " " * _BAR, "matched IoU"], rows, left=(0, 2)))
    for anchor in anchors:
        _wrapped(
            f"{anchor.title}: {anchor.explanation[:1].lower()}{anchor.explanation[1:]}", console, "  ", style="dim"
        )
    console.print()


def _show_averages(found: Evaluation, console: Console) -> None:
    own_title = f"{found.annotator}s"
    cell, last = len("0.000 [0.000, 0.000]") + 2, len(own_title)
    fits = max(1, (console.width - max(map(len, TITLES.values())) - 2 - last) // cell)
    own = {name: found.annotations[name].mean for name in ("diversity", "entropy")}
    own["empty_mass"] = found.annotations["empty_share"].mean
    for start in range(0, len(found.settings), fits):
        part = found.settings[start : start + fits]
        rows = [
            [title, *(s.score(metric).text for s in part), _number(own[metric]) if metric in own else ""]
            for metric, title in TITLES.items()
        ]
        rows.insert(list(TITLES).index("ece") + 1, ["  of pixels", *(percent(s.ece_share) for s in part), ""])
        console.print(table(["", *(f"{s.form} {s.samples}" for s in part), own_title], rows), "")
    for title, meaning in MEANINGS.items():
        _wrapped(f"{title}: {meaning.format(annotator=found.annotator)}", console, "  ", style="dim")
    notes = [text for setting in found.settings for text in _notes(found, setting)]
    for text in notes:
        _wrapped(text, console)
    console.print()


def _show_looking(looking: Looking, annotator: str, console: Console) -> None:
    """What it is worth to leave the images to the model that it is surest of."""
    from ambiseg.evaluation.looking import LOSSES

    rows = [
        [_against(one.loss, annotator), one.aurc.text, one.excess.text]
        + [_number(value) for value in (one.random, one.oracle)]
        for one in looking.shown
    ]
    console.print("when a person must look: images in the order of their expected disagreement", style="bold")
    console.print(table(["against", "AURC", "excess", "random", "best"], rows))
    for one in looking.shown:
        _wrapped(
            f"{_against(one.loss, annotator)}: {LOSSES[one.loss].format(annotator=annotator)}", console, "  ", "dim"
        )
    text = (
        "AURC: mean loss of the images left to the model, over all shares of them; 0 is best; excess: over that of the"
    )
    _wrapped(f"{text} best order", console, "  ", style="dim")
    console.print()


def _against(loss: str, annotator: str) -> str:
    return f"{annotator}s" if loss == "readers" else "GED"


def _notes(found: Evaluation, setting: SettingScores) -> list[str]:
    """What has no value, and why."""
    name, said = f"{setting.form} {setting.samples}", []
    for metric in ("ged", "matched_iou", "diversity"):
        if lacking := found.images - setting.metrics[metric].count:
            what = f"{name}: {lacking:,} of {found.images:,} images have no {TITLES[metric]}"
            said.append(f"{what} under protocol {found.protocol} and are left out")
    if setting.ece.mean is None:
        said.append(f"{name}: no ECE: no pixel is predicted as an evaluated class, so that there is nothing to measure")
    return said


def _show_buckets(found: Evaluation, console: Console) -> None:
    first, who = found.settings[0], f"{found.annotator}s"
    rows = [
        [
            str(bucket.readers),
            f"{bucket.images:,}",
            *(bucket.metrics[metric].text for metric in ("ged", "matched_iou")),
            *(_number(bucket.metrics[metric].mean) for metric in ("diversity", "empty_mass")),
        ]
        for bucket in first.buckets
    ]
    console.print(f"by how many {who} drew anything, {first.form} {first.samples}", style="bold")
    console.print(table([who, "images", "GED", "matched IoU", "diversity", "empty"], rows))
    if first.empty.correlation is not None:
        text = f"probability of an empty mask and share of {who} who drew nothing: r = {first.empty.correlation:.2f}"
        console.print(f"{text}, mean difference {_number(first.empty.error)}", soft_wrap=True)
    console.print()
    if first.empty.calibration:
        rows = [
            [f"{one.low:.1f} to {one.high:.1f}", f"{one.images:,}", _number(one.predicted), _number(one.readers)]
            for one in first.empty.calibration
        ]
        console.print("images by their predicted probability of an empty mask", style="bold")
        console.print(table(["predicted", "images", "mean", f"{who} who drew nothing"], rows), "")


def _show_strata(strata: Strata, annotator: str, console: Console) -> None:
    shown = strata.by_bucket if len(strata.by_bucket) <= (console.width - 44) // 7 else []
    rows = [
        [
            str(k + 1),
            weight.text,
            f"{'█' * round(12 * (weight.mean or 0)):<12}",
            *(_number(bucket.mean[k]) for bucket in shown),
        ]
        for k, weight in enumerate(strata.intervals)
    ]
    by = f", and by how many {annotator}s drew anything" if shown else ""
    head = [strata.name, "mean weight", " " * 12, *(str(bucket.readers) for bucket in shown)]
    console.print(f"weight of each {strata.name}{by}", style="bold")
    console.print(table(head, rows, left=(0, 2)), "")


def _show_modes(modes: Modes, strata: Strata | None, console: Console) -> None:
    rows = [[flip.name, flip.to, _number(flip.truth), _number(flip.predicted)] for flip in modes.flips]
    console.print(f"share of flipped pixels, {modes.setting.replace('-', ' ')}", style="bold")
    console.print(table(["class", "becomes", "truth", "predicted"], rows))
    text = f"{100 * modes.distance:.0f} % of the probability is with the wrong of {len(modes.names)} modes"
    if strata is not None and modes.found is not None:
        text += f"; {modes.found} of them are drawn most often by some {strata.name}"
    if strata is not None and modes.correlation is not None:
        text += f"; weight of each {strata.name} and probability of its mode: r = {modes.correlation:.2f}"
    console.print(f"{text}\n", soft_wrap=True)


def _headline(found: Evaluation) -> SettingScores:
    from ambiseg.config import EvaluationConfig

    return found.headline(EvaluationConfig().samples)


def _wrapped(text: str, console: Console, indent: str = "", style: str | None = None) -> None:
    for line in textwrap.wrap(text, console.width, initial_indent=indent, subsequent_indent=indent * 2):
        console.print(line, style=style)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
