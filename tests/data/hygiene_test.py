"""The data layer opens no connection and never imports TensorFlow; tfds only when asked."""

import subprocess
import sys
import textwrap
from pathlib import Path

CODE = """
    import socket, sys

    def refuse(*args):
        raise AssertionError("opened a connection")

    socket.socket.connect = refuse
    from aodiff.config import base
    from aodiff.data import DATA_SETS, FROM_FILES, describe, open_splits

    lengths = {"digits": 64, "breast_cancer": 31, "wine": 14, "diabetes": 11, "iris": 5}
    lengths |= {"skeleton": 17, "chain_pose": 15, "sudoku4": 16, "sudoku": 81}
    lengths |= {"python_functions": 128, "python_functions_canvas": 128}
    for name in set(DATA_SETS) - set(FROM_FILES):
        c = base().data
        c.name = name
        c.seq_len = lengths.get(name, 32)
        if "maze" in name:
            c.clues, c.maze = (2, 2), (5, 0.5)
        describe(c)
        open_splits(c)
    loaded = {"tensorflow", "tensorflow_datasets", "tiktoken", "tokenizers"} & set(sys.modules)
    assert not loaded, loaded
"""


def test_no_network_and_no_heavy_imports():
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", textwrap.dedent(CODE)], cwd=root, check=True)
