"""Methods by name: one file each, all behind the protocol of :mod:`ambiseg.methods.base`."""

from ambiseg.methods.base import Method, Predictive
from ambiseg.methods.mose.model import MoSE, MoSEPredictive
from ambiseg.methods.mose.official import load_official

METHODS: dict[str, type[Method]] = {"mose": MoSE}

__all__ = ["METHODS", "Method", "MoSE", "MoSEPredictive", "Predictive", "load_official"]
