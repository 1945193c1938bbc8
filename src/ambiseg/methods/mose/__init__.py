"""MoSE, the mixture of stochastic experts (Gao et al., ICLR 2023)."""

from ambiseg.methods.mose.config import MoSEConfig
from ambiseg.methods.mose.model import MoSE, MoSEPredictive
from ambiseg.methods.mose.official import load_official
from ambiseg.methods.mose.tree import register

register()

__all__ = ["MoSE", "MoSEConfig", "MoSEPredictive", "load_official"]
