"""MoSE, the mixture of stochastic experts (Gao et al., ICLR 2023)."""

from ambiseg.methods.mose.model import MoSE, MoSEPredictive
from ambiseg.methods.mose.official import load_official

__all__ = ["MoSE", "MoSEPredictive", "load_official"]
