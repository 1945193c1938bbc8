"""Files of the time when MoSE was the only method, as files for any method."""

from __future__ import annotations

from typing import Any


def evaluation_of_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """The content of an ``ambiseg.Evaluation/1`` as that of an ``ambiseg.Evaluation/2``; every number stays.

    >>> evaluation_of_format_1({"experts": {"count": 2}, "cases": [{"expert_weights": [0.5, 0.5]}]})
    {'cases': [{'strata_weights': [0.5, 0.5]}], 'strata': {'name': 'expert', 'count': 2}}
    """
    names = {"value": "mean", "class": "name", "expert_weights": "strata_weights"}

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return {names.get(k, k): renamed(v) for k, v in value.items()} if isinstance(value, dict) else value

    content = renamed(content)
    experts, modes = content.pop("experts", None), content.get("modes")
    content["strata"] = {"name": "expert", **experts} if isinstance(experts, dict) else experts
    if isinstance(modes, dict):
        modes["strata_iou"] = modes.pop("experts", [])
    return content
