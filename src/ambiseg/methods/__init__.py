"""Methods by name: one file or folder each, all behind the protocol of :mod:`ambiseg.methods.base`."""

from ambiseg.methods.base import (
    METHODS,
    Method,
    MethodConfig,
    Noise,
    ParameterGroup,
    Predictive,
    Stratified,
    method_named,
)
from ambiseg.methods.mose import MoSE, MoSEConfig, MoSEPredictive, load_official

METHODS |= {
    "mose": MoSE,
}

__all__ = [
    "METHODS",
    "Method",
    "MethodConfig",
    "MoSE",
    "MoSEConfig",
    "MoSEPredictive",
    "Noise",
    "ParameterGroup",
    "Predictive",
    "Stratified",
    "load_official",
    "method_named",
]
