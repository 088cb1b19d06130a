"""The quality benchmark: its figures mean what they say, on the demo model and a few tokens."""

from __future__ import annotations

import numpy as np
import pytest
from twinplane.benchmarks import quality


def test_figures_of_a_line_are_those_of_their_definitions():
    tokens = [0, 1, 1]
    exact = np.log(np.array([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]], np.float32))
    other = np.log(np.array([[0.5, 0.5], [0.75, 0.25], [0.8, 0.2]], np.float32))
    line = quality._line(quality.Format("other"), other, exact, tokens)
    assert line["perplexity"] == pytest.approx((0.5 * 0.25) ** -0.5, abs=1e-4)
    assert line["kl_from_float32"] == pytest.approx((0.5 * np.log(3) + 0.9 * np.log(9 / 8) + 0.1 * np.log(1 / 2)) / 3, abs=1e-5)
    assert line["same_most_likely_token"] == pytest.approx(2 / 3, abs=1e-4)
    assert quality._line(quality.Format("same"), exact, exact, tokens)["kl_from_float32"] == 0


@pytest.mark.slow
@pytest.mark.model
def test_formats_of_the_demo_model_stay_near_float32(monkeypatch):
    names = ("float32", "GGUF blocks as stored", "GGUF blocks, int8 activations", "FP8 KV")
    monkeypatch.setattr(quality, "FORMATS", tuple(form for form in quality.FORMATS if form.name in names))
    lines = {line["format"]: line for line in quality.run(tokens=100)["formats"]}
    assert set(lines) == set(names)
    assert lines["float32"]["kl_from_float32"] == 0 and lines["GGUF blocks as stored"]["kl_from_float32"] < 1e-6
    for name in names[2:]:
        assert 0 < lines[name]["kl_from_float32"] < 0.02
        assert lines[name]["perplexity"] == pytest.approx(lines["float32"]["perplexity"], rel=0.05)
