"""Files that are written whole, and JSON that any reader takes."""

import json
import math

import numpy as np

from kvbench.common.files import write_json


def test_json_is_plain_and_has_no_nan(tmp_path):
    write_json(tmp_path / "x.json", {"a": np.float64(1.5), "b": np.array([1, 2]), "c": math.nan, "d": (math.inf, None)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1.5, "b": [1, 2], "c": None, "d": [None, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]  # no scratch file left
