"""What is said of packages that are broken, of another version, or built for another CUDA: a reason, without importing them."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from chitu_diffusion.attention import kernels
from chitu_diffusion.attention.kernel import Abilities
from chitu_diffusion.attention.packages import version

KILLS = "import os; os._exit(3)\n"


class Site:
    """A folder on the import path, to put distributions into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def add(self, distribution: str, version: str, *modules: str, **files: str) -> None:
        """Install `distribution` with `modules`, all of which end the process when they are imported."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        for module in modules:
            path = self.folder / module / "__init__.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(KILLS)
            self.modules.append(module)
        for name, text in files.items():
            (self.folder / modules[0] / name.replace("_json", ".json")).write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty folder on the path, on a machine that seems to have a Hopper GPU and CUDA 13."""
    site = Site(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Abilities, "capability_refusal", lambda self: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    yield site
    imported = set(site.modules) & set(sys.modules)
    assert imported == set()


@pytest.mark.parametrize(
    "name, named", [("fa2", "flash-attn"), ("fa3", "fa3-fwd"), ("xformers", "xformers"), ("sage", "sageattention")]
)
def test_a_missing_package_is_named(name: str, named: str, site: Site) -> None:
    assert f"pip install {named}" in str(kernels()[name].available())


def test_a_working_package_is_usable(site: Site) -> None:
    site.add("flash-attn", "2.8.3.post2", "flash_attn", "flash_attn_2_cuda")
    site.add("fa3-fwd", "0.0.3", "fa3_fwd_interface", "fa3_fwd")
    site.add("sageattention", "1.0.6", "sageattention")
    site.add("triton", "3.6.0", "triton")
    site.add("xformers", "0.0.40", "xformers", cpp_lib_json='{"version": {"cuda": 1300, "torch": "2.11.0+cu130"}}')
    assert {name: kernels()[name].available() for name in ("fa2", "fa3", "sage", "xformers")} == {
        "fa2": None,
        "fa3": None,
        "sage": None,
        "xformers": None,
    }


def test_flash_attn_4_is_not_version_2(site: Site) -> None:
    """It installs a module flash_attn too: asking only whether that is there ends in an ImportError in a step."""
    site.add("flash-attn-4", "4.0.0b36", "flash_attn")
    reason = str(kernels()["fa2"].available())
    assert "needs the package flash-attn" in reason and "flash-attn-4" in reason


def test_flash_attn_without_its_kernels(site: Site) -> None:
    site.add("flash-attn", "2.8.3", "flash_attn")
    assert "flash_attn_2_cuda" in str(kernels()["fa2"].available())


def test_an_old_flash_attn(site: Site) -> None:
    site.add("flash-attn", "2.5.9.post1", "flash_attn", "flash_attn_2_cuda")
    assert kernels()["fa2"].available() == "needs flash-attn 2.6 or newer"


def test_xformers_of_another_cuda(site: Site) -> None:
    site.add("xformers", "0.0.35", "xformers", cpp_lib_json='{"version": {"cuda": 1208, "torch": "2.10.0+cu128"}}')
    reason = str(kernels()["xformers"].available())
    assert "built for CUDA 12" in reason and "2.10.0+cu128" in reason and torch.__version__ in reason


def test_sage_needs_triton(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    if "triton" in sys.modules:
        pytest.skip("triton is installed and imported here")
    site.add("sageattention", "1.0.6", "sageattention")
    assert "triton" in str(kernels()["sage"].available())


@pytest.mark.parametrize(
    "text, numbers", [("2.8.3.post2", (2, 8, 3)), ("2.10rc1", (2, 10)), ("1.0+cu13", (1, 0)), ("3", (3,))]
)
def test_version_numbers(text: str, numbers: tuple[int, ...], site: Site) -> None:
    site.add("some-package", text)
    assert version("some-package") == numbers


def test_sage_leaves_the_keys_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1.0.6 subtracts the mean from the keys in place."""
    calls = []

    def sageattn(q: Any, k: Any, v: Any, tensor_layout: str, is_causal: bool, sm_scale: float | None) -> Any:
        calls.append((tensor_layout, is_causal, sm_scale))
        k -= k.mean(dim=1, keepdim=True)
        scale = sm_scale if sm_scale is not None else q.shape[-1] ** -0.5
        scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
        return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)

    fake = types.ModuleType("sageattention")
    fake.sageattn = sageattn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sageattention", fake)
    kernel = kernels()["sage"]
    kernel.load()
    q, k, v = torch.randn(3, 2, 9, 4, 64).unbind()
    for keys in (k, k.transpose(1, 2).contiguous().transpose(1, 2)):
        before = keys.clone()
        out = kernel.run(q, keys, v, None, False, 0.2)
        assert torch.equal(keys, before)
        assert out.shape == q.shape
    assert calls == [("NHD", False, 0.2)] * 2
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=0.2)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)
    compiled = torch.compile(kernel.run, fullgraph=True, backend="aot_eager")(q, k, v, None, False, 0.2)
    torch.testing.assert_close(compiled, out)
    assert torch.equal(k, before) and len(calls) == 3
