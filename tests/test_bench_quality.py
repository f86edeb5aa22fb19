"""Distances between pictures, against references, and the interval of their mean."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from skimage.metrics import structural_similarity

from chitu_diffusion.bench.quality import EQUAL_DB, Drawn, bootstrap, compare, summarise
from chitu_diffusion.evaluation.pictures import MS_SSIM_EXPONENTS, ms_ssim, relative_l2, ssim_terms


def pictures(size: int = 176, noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    low = torch.rand(1, 3, 8, 8, generator=g, dtype=torch.float64)
    one = torch.nn.functional.interpolate(low, size=(size, size), mode="bilinear")[0].movedim(0, -1)
    return one, (one + noise * torch.randn(one.shape, generator=g, dtype=torch.float64)).clamp(0, 1)


def test_one_scale_is_that_of_scikit_image() -> None:
    one, other = pictures()
    luminance, contrast = ssim_terms(one.movedim(-1, 0)[:, None], other.movedim(-1, 0)[:, None], 1.0)
    _, full = structural_similarity(
        one.numpy(), other.numpy(), data_range=1.0, channel_axis=-1, gaussian_weights=True, sigma=1.5,
        use_sample_covariance=False, full=True,
    )  # fmt: skip
    ours = (luminance * contrast)[:, 0].movedim(0, -1).numpy()
    assert np.allclose(ours, full[5:-5, 5:-5], atol=1e-10)


def test_ms_ssim() -> None:
    one, other = pictures()
    assert math.isclose(sum(MS_SSIM_EXPONENTS), 1, abs_tol=1e-3)
    assert ms_ssim(one, one) == pytest.approx(1)
    slight, strong = ms_ssim(*pictures(noise=0.02)), ms_ssim(one, other)
    assert slight is not None and strong is not None and 0 < strong < slight < 1
    assert ms_ssim(*pictures(160)) is None, "the coarsest scale is smaller than the window"


def test_relative_l2() -> None:
    assert relative_l2(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0])) == 0.8


def test_equal_pictures_have_a_mean() -> None:
    one, other = pictures(16)
    drawn = Drawn(torch.stack([one, other]).float(), None)
    base = Drawn(torch.stack([one, one]).float(), None)
    values = compare(drawn, base)
    assert values["psnr"][0] == EQUAL_DB and 15 < values["psnr"][1] < 30
    found = summarise(values, ["a", "b"])
    assert found["psnr"]["worst"] == pytest.approx(values["psnr"][1], rel=1e-5)
    assert "latent_rel_l2" not in found and "ms_ssim" not in found


def test_the_interval_is_of_prompts_and_always_the_same() -> None:
    numbers, prompts = [1.0, 1.0, 3.0, 3.0], ["a", "a", "b", "b"]
    low, high = bootstrap(numbers, prompts)
    assert (low, high) == bootstrap(numbers, prompts) == (1.0, 3.0)
    wide, narrow = bootstrap(list(range(10)), list(range(10))), bootstrap(list(range(10)) * 10, list(range(100)))
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_without_lpips_it_says_what_is_missing() -> None:
    from importlib.util import find_spec

    from chitu_diffusion.evaluation.perceptual import lpips_distance

    if find_spec("lpips") is not None:
        pytest.skip("lpips is installed")
    told: list[str] = []
    reason = lpips_distance(told.append)
    assert isinstance(reason, str) and "chitu-diffusion[eval]" in reason and told == []


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "import lpips fails (RuntimeError: operator",
        ),
        ("def LPIPS(net, verbose): raise OSError('no route to host')", "its weights cannot be had: no route to host"),
    ],
    ids=["a torchvision for another torch", "no network"],
)
def test_lpips_that_cannot_be_used_is_left_out(
    module: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chitu_diffusion.evaluation.perceptual import lpips_distance

    (tmp_path / "lpips.py").write_text(module)
    monkeypatch.delitem(sys.modules, "lpips", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    downloads: list[str] = []
    reason = lpips_distance(downloads.append)
    assert isinstance(reason, str) and reason.startswith("LPIPS is left out") and told in reason
    assert ("raise RuntimeError" in module) != any("233 MB from download.pytorch.org" in line for line in downloads)
    sys.modules.pop("lpips", None)
