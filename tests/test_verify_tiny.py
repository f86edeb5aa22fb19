"""What ``chitu verify`` does, on every tiny pipeline: all four seams hooked, every site compared, no difference."""

from __future__ import annotations

import pytest
from tiny import ALL, build, run

from chitu_diffusion import patch
from chitu_diffusion.evaluation.parity import compare, make_probe, record


@pytest.mark.parametrize("name", ALL)
def test_no_site_differs(name: str) -> None:
    pipe = build(name)
    with patch(pipe) as handle:
        sites = handle.sites
    reference = record(sites, lambda: run(name, pipe, steps=3))
    probe = make_probe(sites)
    with patch(pipe, features=(probe,)):
        hooked = compare(sites, lambda: run(name, pipe, steps=3), reference)
    assert not probe.idle(sites)
    assert all(calls > 0 for calls in probe.seams().values())
    assert {row.kind for row in hooked} >= {"denoiser", "stack", "block", "attention", "output"}
    assert [row for row in hooked if not row.equal] == []
    undone = compare(sites, lambda: run(name, pipe, steps=3), reference)
    assert [row for row in undone if not row.equal] == []
