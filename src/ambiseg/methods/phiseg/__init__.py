"""PHiSeg (Baumgartner et al., MICCAI 2019)."""

from ambiseg.methods.phiseg.model import PHiSeg, PHiSegConfig, PHiSegPredictive

__all__ = ["PHiSeg", "PHiSegConfig", "PHiSegPredictive"]
