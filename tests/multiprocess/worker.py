"""The real entry point with the toy method in its table, for tests that stop processes."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import app  # noqa: E402

from aodiff import main  # noqa: E402
from tests import toy  # noqa: E402

if __name__ == "__main__":
    toy.register()
    app.run(main.main, flags_parser=main.parse)
