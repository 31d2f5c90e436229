"""The table of methods, and the one place that looks a name up in it."""

import contextlib
from collections.abc import Iterator

from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.methods.aogpt import AOGPTMethod
from aodiff.methods.base import Method
from aodiff.methods.flexmdm import FlexMDMMethod
from aodiff.methods.mdm import MDMMethod
from aodiff.methods.ordergpt import OrderGPTMethod
from aodiff.methods.sas import SASMethod
from aodiff.methods.sas_denoiser import SASDenoiserMethod

METHODS = {
    "aogpt": AOGPTMethod,
    "ordergpt": OrderGPTMethod,
    "mdm": MDMMethod,
    "flexmdm": FlexMDMMethod,
    "flexmdm_retrofit": FlexMDMMethod,
    "sas": SASMethod,
    "sas_denoiser": SASDenoiserMethod,
}


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Makes a value that some part of a method refuses a ConfigError."""
    try:
        yield
    except ValueError as e:
        raise ConfigError(f"{e}") from e


def build(config, info: DataInfo) -> Method:
    """Builds `config.method.name` for the data.

    Its evaluations and its sampler are built once too, so that a bad value anywhere raises
    ConfigError before any device work.
    """
    name = config.method.name
    if name not in METHODS:
        raise ConfigError(f'method.name="{name}" is unknown; choose one of {sorted(METHODS)}')
    with one_sentence():
        method = METHODS[name].from_config(config, info)
        method.evaluations(config)
        method.sampler(config, 0)
    return method
