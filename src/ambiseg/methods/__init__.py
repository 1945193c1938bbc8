"""Methods by name: one file or folder each, all behind the protocol of :mod:`ambiseg.methods.base`."""

from ambiseg.methods.base import (
    METHODS,
    Method,
    MethodConfig,
    Noise,
    ParameterGroup,
    Predictive,
    PublishedConfig,
    Stratified,
    method_named,
)
from ambiseg.methods.car import CAR, CARConfig
from ambiseg.methods.ccdm import CCDM
from ambiseg.methods.ensemble import Ensemble
from ambiseg.methods.hpunet import HPUNet, HPUNetConfig
from ambiseg.methods.hu2019 import Hu
from ambiseg.methods.mc_dropout import MCDropout
from ambiseg.methods.mose import MoSE, MoSEConfig, MoSEPredictive, load_official
from ambiseg.methods.phiseg import PHiSeg, PHiSegConfig
from ambiseg.methods.probunet import ProbUNet
from ambiseg.methods.probunet_gmm import ProbUNetGMM
from ambiseg.methods.ssn import SSN, SSNConfig
from ambiseg.methods.symmetries import symmetric
from ambiseg.methods.unet import UNetConfig, UNetMethod

METHODS |= {
    "mose": MoSE,
    "unet": UNetMethod,
    "ensemble": Ensemble,
    "mc-dropout": MCDropout,
    "probunet": ProbUNet,
    "probunet-gmm": ProbUNetGMM,
    "hpunet": HPUNet,
    "phiseg": PHiSeg,
    "hu2019": Hu,
    "ssn": SSN,
    "car": CAR,
    "ccdm": CCDM,
}

__all__ = [
    "CAR",
    "CCDM",
    "METHODS",
    "SSN",
    "CARConfig",
    "Ensemble",
    "HPUNet",
    "HPUNetConfig",
    "Hu",
    "MCDropout",
    "Method",
    "MethodConfig",
    "MoSE",
    "MoSEConfig",
    "MoSEPredictive",
    "Noise",
    "PHiSeg",
    "PHiSegConfig",
    "ParameterGroup",
    "Predictive",
    "ProbUNet",
    "ProbUNetGMM",
    "PublishedConfig",
    "SSNConfig",
    "Stratified",
    "UNetConfig",
    "UNetMethod",
    "load_official",
    "method_named",
    "symmetric",
]
