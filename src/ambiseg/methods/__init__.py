"""Methods by name: one file or folder each, all behind the protocol of :mod:`ambiseg.methods.base`."""

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import did_you_mean
from ambiseg.methods.base import Method, MethodConfig, Noise, ParameterGroup, Predictive, Stratified
from ambiseg.methods.mose import MoSE, MoSEConfig, MoSEPredictive, load_official

METHODS: dict[str, type[Method]] = {
    "mose": MoSE,
}
DEFAULT = "mose"  # of a recipe that does not say


def method_named(name: str | None) -> type[Method]:
    """The class of a method by its key in ``METHODS``; ``None`` is the default."""
    name = DEFAULT if name is None else name
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError(f"model.method: expected one of {known}, found {name!r}{did_you_mean(str(name), METHODS)}")
    return METHODS[name]


__all__ = [
    "DEFAULT",
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
