"""Start-up arguments and ports; connected processes are tested in train_test.py."""

import socket

import pytest

from aodiff import distributed, profiling
from aodiff.config import ConfigError


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("127.0.0.1:1", None, 0), "go together; give all three or none"),
        ((None, 2, None), "go together"),
        (("127.0.0.1:1", 2, 2), "--process_id=2 is not below --num_processes=2"),
    ],
)
def test_arguments_must_fit(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        distributed.start(*arguments)


def test_free_port_is_free():
    port = distributed.free_port()
    with socket.socket() as s:
        s.bind(("127.0.0.1", port))


def test_without_a_coordination_service_nothing_is_preempted():
    assert not distributed.preempted()
    distributed.barrier("alone")  # one process is always complete


@pytest.mark.parametrize("window", ["3", "5:5", "a:b", "1:2:3"])
def test_bad_trace_window(window):
    with pytest.raises(ConfigError, match="write it like --profile=10:13"):
        profiling.parse_window(window)


def test_trace_window():
    assert profiling.parse_window("10:13") == (10, 13) and profiling.parse_window("") == (0, 0)
