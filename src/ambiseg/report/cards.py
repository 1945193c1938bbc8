"""Cases as HTML, in the manner of the paper's figures: what the readers drew, and a row for each expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from ambiseg.report import pictures
from ambiseg.report.figures import EXPERTS, VARIABLES, expert_ranks
from ambiseg.report.gallery import GALLERIES, Gallery, View, Voice
from ambiseg.report.results import Results
from ambiseg.viz.drawing import reader_colours

# Lines over an image are in the colours of the dark page, which stand out from grey pixels
_BRIGHT = ("#6ba8ea", "#f0975a", "#4cc3a2", "#e583b4", "#dcb840", "#a898f0", "#62c6e2", "#bfae98")
_TOP = math.log(2)  # nats
_SCORES = {
    "ged": "GED",
    "ged_unbiased": "unbiased",
    "matched_iou": "matched IoU",
    "diversity": "diversity",
    "entropy": "entropy",
}


def galleries(gallery: Gallery, results: Results, key: str) -> str:
    """All chosen cases. A case that is of two kinds is drawn once, and linked from the other."""
    colours = pictures.class_colours(results.classes, results.evaluated, results.flipped)
    drawn: dict[str, tuple[str, str]] = {}
    parts = [_legend(results, colours)]
    for kind, (title, text) in GALLERIES.items():
        parts.append(f'<h3>{title}</h3><p class="soft">{text}</p>')
        names = gallery.chosen[kind]
        if not names:
            parts.append('<p class="soft">No case has a score.</p>')
        for number, name in enumerate(names, 1):
            if name in drawn:
                place, where = drawn[name]
                link = f'<a href="#{place}">shown under {escape(where)}</a>'
                parts.append(f'<p class="again"><b>{escape(name)}</b> {_scores(gallery.views[name], key)} · {link}</p>')
            else:
                place = f"case-{kind}-{number}"
                drawn[name] = place, title
                parts.append(_card(gallery.views[name], gallery.span, results, colours, key, place))
    return "\n".join(parts)


def _legend(results: Results, colours: Sequence[str]) -> str:
    items = [
        f"<span>entropy 0<i class=scale style='background:linear-gradient(90deg,{','.join(pictures.HEAT)})'></i>"
        f"{_TOP:.2f} nats: two classes as likely as each other</span>"
    ]
    if len(colours) == 2:
        items.insert(0, f"<span>white: {escape(results.classes[1])}</span>")
    else:
        items[:0] = [
            f"<span><i class=swatch style='background:{colour}'></i>{escape(name)}</span>"
            for name, colour in zip(results.classes, colours, strict=True)
        ]
    return f'<div class="legend">{"".join(items)}</div>'


def _card(view: View, span: tuple[float, float], results: Results, colours: Sequence[str], key: str, place: str) -> str:
    name = view.scored.name
    image = pictures.data_uri(pictures.photograph(view.image, span))
    height, width = view.image.shape[1:]
    style = f"--image:url({image});--aspect:{width}/{height}"
    landscape = " landscape" if width > 1.4 * height else ""
    modes = results.modes is not None
    readers, experts = _readers(view, image, colours, modes), _experts(view, results, colours)
    return (
        f'<article class="case{landscape}" id="{place}" style="{style}" aria-labelledby="{place}-name">'
        f'<header><h4 id="{place}-name">{escape(name)} <span>{_said(view, modes)}</span></h4>'
        f"<p>{_scores(view, key)}</p>"
        f'</header><div class="halves">{readers}{experts}</div>'
        "</article>"
    )


def _readers(view: View, image: str, colours: Sequence[str], modes: bool) -> str:
    """The image, everybody's outlines, the different masks with their frequency, and where readers and model waver."""
    name, opinions = view.scored.name, view.opinions
    tones = list(reader_colours([str(i) for i in range(len(opinions))]).values())
    lines = pictures.outlines([o.labels for o in opinions], tones, 4)
    pair = _tile(image, f"{name}: the image", "image", photo=True)
    pair += _tile(
        pictures.data_uri(lines),
        f"{name}: the image with the readers' outlines",
        "outlines" if modes else "readers' outlines",
        True,
    )
    shown = []
    for i, (opinion, tone) in enumerate(zip(opinions, tones, strict=True)):
        ring = "" if modes else f'<i class="swatch ring" style="border-color:{tone}"></i>'  # outlines are all one
        alt, caption = f"{name}: mask of {_share(view, i)}", ring + _share(view, i)
        shown.append(_mask(opinion.labels, colours, view.valid, alt, caption))
    maps = "".join(
        _tile(pictures.data_uri(pictures.heat(values, _TOP)), f"{name}: entropy of {whose}", f"entropy, {whose}")
        for values, whose in ((view.disagreement, "readers"), (view.entropy, "prediction"))
    )
    rest = 1 - sum(o.share for o in opinions)
    more = f'<p class="soft">and other masks with {100 * rest:.0f} % of the weight</p>' if rest > 0.005 else ""
    if view.image.shape[2] > 1.4 * view.image.shape[1]:
        pair, maps = pair + maps, ""
    below = f'<div class="pair">{maps}</div>' if maps else ""
    row = f'<div class="row">{"".join(shown)}</div>{more}'
    title = "Modes" if modes else "Readers"
    return f'<div class="readers"><h5>{title}</h5><div class="pair">{pair}</div>{row}{below}</div>'


def _experts(view: View, results: Results, colours: Sequence[str]) -> str:
    """A row for each expert, the heaviest first: its mode over the image, its samples, the mean of them."""
    mean = [] if results.experts is None else results.experts.mean
    own, _ = expert_ranks(mean)
    samples = len(view.voices[0].masks)
    rows = []
    for voice in view.voices:
        rank = own.index(voice.number - 1) if voice.number is not None and voice.number - 1 in own else None
        tone = "var(--others)" if rank is None else f"var({VARIABLES[EXPERTS[rank]]})"
        bright = "#ffffff" if rank is None else _BRIGHT[rank]
        rows.append(_row(view, voice, colours, tone, bright))
    single = view.voices[0].number is None
    title = "Samples" if single else "Experts, by weight"
    unseen, weight = view.unseen
    more = f'<p class="soft">and {unseen} more experts with {100 * weight:.1f} % of the weight</p>' if unseen else ""
    columns = f"<span>most likely</span><span class=span>{samples} samples</span><span>mean</span>"
    head = f'<div class="expert head" aria-hidden="true"><span></span><div class="row">{columns}</div></div>'
    return f'<div style="--samples:{samples}"><h5>{title}</h5>{head}{"".join(rows)}{more}</div>'


def _row(view: View, voice: Voice, colours: Sequence[str], tone: str, bright: str) -> str:
    name = view.scored.name
    who = "the model" if voice.number is None else f"expert {voice.number}, weight {100 * voice.weight:.0f} %"
    mode = voice.probability.argmax(0)
    lines = pictures.data_uri(pictures.outlines([mode], [bright], 5))
    tiles = _tile(lines, f"{name}: most likely outline of {who}", "", True, empty=not mode.any())
    for number, labels in enumerate(voice.masks, 1):
        tiles += _mask(labels, colours, None, f"{name}: sample {number} of {who}", "")
    mixed = pictures.probability(voice.probability.astype(np.float32), colours)
    tiles += _tile(pictures.data_uri(mixed), f"{name}: mean probability of {who}", "")
    label = "all samples" if voice.number is None else f"expert {voice.number}"
    bar = f'<span class="bar"><i style="width:{100 * voice.weight:.1f}%;--tone:{tone}"></i></span>'
    weight = "" if voice.number is None else f"<b>{_percent(voice.weight)}</b>{bar}"
    return f'<div class="expert"><div class="who">{label}{weight}</div><div class="row">{tiles}</div></div>'


def _mask(labels: np.ndarray, colours: Sequence[str], valid: np.ndarray | None, alt: str, caption: str) -> str:
    """Void is the annotations': a prediction is shown whole."""
    empty = not (labels if valid is None else labels * valid).any()
    picture = pictures.data_uri(pictures.mask(labels, colours, valid))
    return _tile(picture, alt + (", empty" if empty else ""), caption, empty=empty)


def _tile(source: str, alt: str, caption: str, over: bool = False, empty: bool = False, photo: bool = False) -> str:
    """A picture; ``over`` lays it over the case's image. ``caption`` is HTML."""
    kind = ' class="photo over"' if over else ' class="photo"' if photo else ""
    none = '<span class="none" aria-hidden="true">empty</span>' if empty and not over else ""
    text = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure class="tile"><img{kind} src="{source}" alt="{escape(alt)}">{none}{text}</figure>'


def _said(view: View, modes: bool) -> str:
    scored = view.scored
    if modes:
        return f"{scored.readers_total} modes"
    return f"{scored.readers} of {scored.readers_total} readers drew something"


def _share(view: View, index: int) -> str:
    opinion = view.opinions[index]
    if view.equal and view.scored.readers_total:
        return f"{opinion.readers} of {view.scored.readers_total}"
    return _percent(opinion.share)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %"


def _scores(view: View, key: str) -> str:
    scores = view.scored.scores.get(key, {})
    known = {label: scores.get(name, math.nan) for name, label in _SCORES.items()}
    shown = [f"{label} {value:.3f}" for label, value in known.items() if math.isfinite(value)]
    return " · ".join(shown).replace("-", "−") or "no score"
