"""What the masks of a scene mean: one mask, fewer masks, measurements, guarantees. Computed when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from ambiseg._util.bands import counted
from ambiseg.decisions.compaction import Compacted, compact
from ambiseg.decisions.consensus import Consensus, consensus_each
from ambiseg.decisions.measure import measure_all
from ambiseg.prediction.looking import reasons, verdict
from ambiseg.serving.scene import Scene, pack

RULES = ("dice", "iou", "marginal", "majority", "union", "intersection")
BOUNDS = ("outer", "inner")


class Decisions:
    """Of one scene. Every part is computed once, by one thread at a time.

    Args:
        scene: whose masks they are.
        evaluated: the classes that a distance between masks is about.

    >>> from ambiseg.data import Nodules
    >>> from ambiseg.serving.view.scenes import ReadersScene
    >>> data = Nodules()
    >>> found = Decisions(ReadersScene(data[7], data), data.evaluated)
    >>> told = found.about(keep=2, of=1)
    >>> [one["how"] for one in told["consensus"]][:2], len(told["kept"]["weights"])
    (['dice', 'iou'], 2)
    """

    def __init__(self, scene: Scene, evaluated: Sequence[int]) -> None:
        self.scene, self.prediction, self.evaluated = scene, scene.prediction, tuple(evaluated)
        self.classes = len(self.prediction.classes)
        self._lock, self._made = Lock(), dict[Any, Any]()

    def about(self, keep: int, of: int) -> dict[str, Any]:
        """As JSON.

        Args:
            keep: how many masks stand for all of them, at most.
            of: the class that is measured.
        """
        found, look = self.prediction, self.prediction.look
        kept = self._kept(keep)
        weights = [weight for weight in kept.masks.mass[0].tolist() if weight > 0]
        return {
            "class": of,
            "look": None
            if look is None
            else {"needed": look.needed, "verdict": verdict(look)[1], "score": look.score}
            | {"reasons": list(reasons(look))},
            "consensus": [self._one(one) for one in self._consensus().values()],
            "kept": {
                "asked": keep,
                "weights": weights,
                "pixels": [self._pixels(labels) for labels in kept.masks.labels[0, : len(weights)]],
                "loss": float(kept.loss[0]),
                "of": found.masks.count,
            },
            "measurements": self._measured(of),
            "bounds": self._bounds(),
        }

    def packed(self, k: int, keep: int) -> bytes:
        """Their masks in slice ``k``, in the form of a slice: ``consensus``, ``kept``, and ``bounds`` where there are
        guarantees, the outer one of each class and the inner one."""
        ones, kept = self._consensus().values(), self._kept(keep)
        some = int((kept.masks.mass[0] > 0).sum())
        arrays = {
            "consensus": np.stack([self._at(one.labels[0], k) for one in ones]),
            "kept": self._at(kept.masks.labels[0, :some], k),
        }
        if (found := self.prediction.guaranteed) is not None:
            bounds = [getattr(one, name) * np.int64(one.id) for one in found.classes for name in BOUNDS]
            arrays["bounds"] = np.stack(bounds)
        dtype = np.uint8 if self.classes <= 256 else np.uint16
        return pack({name: array.astype(dtype, copy=False) for name, array in arrays.items()}, k, {"keep": keep})

    # -- parts --------------------------------------------------------------------------------------------------------

    def _once(self, key: Any, make: Any) -> Any:
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]

    def _consensus(self) -> dict[str, Consensus]:
        classes = list(range(1, self.classes)) or [0]
        return self._once("consensus", lambda: consensus_each(self.prediction.masks, RULES, classes=classes))

    def _kept(self, keep: int) -> Compacted:
        return self._once(("kept", keep), lambda: compact(self.prediction.masks, keep, classes=self.evaluated))

    def _measured(self, of: int) -> list[dict[str, Any]]:
        masks, spacing = self.prediction.masks, self.prediction.source.spacing
        made = self._once(("measured", of), lambda: measure_all(masks, (of,), spacing))
        return [one.summary() for one in made]

    def _one(self, one: Consensus) -> dict[str, Any]:
        numbers = {"expected_dice": float(one.expected_dice[0]), "expected_iou": float(one.expected_iou[0])}
        known = {name: None if value != value else value for name, value in numbers.items()}
        return {"how": one.how, **known, "pixels": self._pixels(one.labels[0])}

    def _bounds(self) -> dict[str, Any] | None:
        found = self.prediction.guaranteed
        if found is None:
            return None
        of, listed = found.calibration, []
        for one in found.classes:
            pixels = [int(getattr(one, name).sum()) for name in BOUNDS]
            listed.append({"class": one.id, "name": one.name, "area": list(one.area), "pixels": pixels})
        return {"alpha": of.alpha, "per": of.per, "data": of.data, "patients": of.patients, "classes": listed}

    def _pixels(self, labels: Tensor) -> list[int]:
        return counted(labels.numpy(), self.classes).tolist()

    def _at(self, labels: Tensor, k: int) -> np.ndarray:
        """Slice ``k`` of maps ``[…, (D,) H, W]``."""
        return (labels if self.scene.slices == 1 else labels[..., k, :, :]).numpy()
