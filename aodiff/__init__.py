"""Any-order generation models in JAX: train, score, sample and compare."""

__version__ = "0.1.0"
