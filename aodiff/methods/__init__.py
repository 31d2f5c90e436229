"""The table of methods, and the one place that looks a name up in it."""

from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.methods.aogpt import AOGPTMethod
from aodiff.methods.base import Method

METHODS = {"aogpt": AOGPTMethod}


def build(config, info: DataInfo) -> Method:
    """Builds `config.method.name` for the data; raises ConfigError before any device work."""
    name = config.method.name
    if name not in METHODS:
        raise ConfigError(f'method.name="{name}" is unknown; choose one of {sorted(METHODS)}')
    return METHODS[name].from_config(config, info)
