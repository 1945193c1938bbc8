"""Experts that draw alike become one: what ``ambiseg prune`` does to this method."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ambiseg.methods.schedules import values_of
from ambiseg.nn.experts import Experts

MoSE: TypeAlias = Any  # of model.py, which imports this


def merged(model: MoSE, groups: Sequence[Sequence[int]], usage: Sequence[float]) -> MoSE:
    """Each group of experts as one: the latent Gaussian of the most used, and the sum of all weights.

    Weights that are fixed are summed. The last layer of a learned gate begins with  w_g = Σ_k u_k w_k,  u the share of
    each expert in its group; the sums themselves are what is fitted.
    """
    config, heaviest = model.config, [max(group, key=lambda k: (usage[k], -k)) for group in groups]
    settings: dict[str, Any] = {"experts": len(groups)}
    if config.expert_weights != "learned":
        assert model.gate.fixed is not None
        sums = torch.stack([model.gate.fixed.double()[list(group)].sum() for group in groups])
        settings["expert_weights"] = (sums / sums.sum()).tolist()
    fewest = math.ceil(1 / (len(groups) * min(values_of(config.capacity))) - 1e-6)
    if min(values_of(config.samples)) < fewest:  # the mass of all annotations must fit
        settings["samples"] = fewest
    other = copy.deepcopy(model)
    other.config = config.changed(**settings)
    other.experts = Experts(len(groups), config.latent, config.stochastic, config.diagonal).to(model.experts.mean)
    with torch.no_grad():
        other.experts.mean.copy_(model.experts.mean[heaviest])
        if other.experts.log_sigma is not None and model.experts.log_sigma is not None:
            other.experts.log_sigma.copy_(model.experts.log_sigma[heaviest])
        if config.expert_weights != "learned":
            other.gate.fixed = torch.tensor(settings["expert_weights"], dtype=torch.float32)
            return other
        last = model.gate.layers[-1]
        assert isinstance(last, nn.Linear)
        rows = []
        for group in groups:
            share = torch.tensor([max(usage[k], 1e-12) for k in group], dtype=torch.float64)
            rows.append((share / share.sum()).to(last.weight) @ last.weight[list(group)])
        smaller = nn.Linear(last.in_features, len(groups), bias=False).to(last.weight)
        smaller.weight.copy_(torch.stack(rows))
        other.gate.layers[-1] = smaller
    return other
