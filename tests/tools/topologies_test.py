"""Names of TPU slices."""

import pytest

from aodiff.config import ConfigError
from aodiff.tools import topologies


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("v5e:4x4", "v5e:4x4", 16),
        ("v5e-1", "v5e:1x1", 1),
        ("v5litepod-8", "v5e:2x4", 8),
        ("v6e-16", "v6e:4x4", 16),
        ("V6E-256", "v6e:16x16", 256),
        ("v5p-8", "v5p:2x2x1", 4),  # counts cores
        ("v5p-128", "v5p:4x4x4", 64),
        ("v4-16", "v4:2x2x2", 16),  # two devices a chip
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),
    ],
)
def test_names(text, name, devices):
    parsed = topologies.parse(text)
    assert (parsed.name, parsed.num_devices) == (name, devices)


@pytest.mark.parametrize(
    "text", ["v9:2x2", "v5e", "v5e:2x2x2", "v5e:0x4", "v5e-6", "v5p-3", "", "16"]
)
def test_other_names_are_one_sentence_with_an_example(text):
    with pytest.raises(ConfigError, match="use one like v5e:4x4"):
        topologies.parse(text)
