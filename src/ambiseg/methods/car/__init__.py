"""Calibrated adversarial refinement (Kassapis et al., ICCV 2021)."""

from ambiseg.methods.car.config import CARConfig
from ambiseg.methods.car.model import CAR
from ambiseg.methods.car.predictive import CARPredictive

__all__ = ["CAR", "CARConfig", "CARPredictive"]
