"""``chitu env``: versions, devices, and every attention kernel with why it can or cannot be used here."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from chitu_diffusion import __version__

PACKAGES = (
    "chitu-diffusion", "torch", "diffusers", "transformers", "accelerate", "safetensors", "wrapt", "peft", "triton",
    "flash-attn", "flash-attn-4", "fa3-fwd", "xformers", "sageattention", "scikit-image", "imageio-ffmpeg",
)  # fmt: skip
"""Distributions that make a difference."""

DEVICES = """
import json, torch
names = []
for index in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(index)
    detail = f"{found.total_memory / 2**30:.0f} GiB, capability {found.major}.{found.minor}"
    names.append([f"cuda:{index}", found.name, detail])
if torch.backends.mps.is_available():
    names.append(["mps", "Apple GPU", ""])
print(json.dumps({"devices": names, "cuda": torch.version.cuda or torch.version.hip or "none",
    "threads": torch.get_num_threads()}))
"""

KERNELS = """
import json
from chitu_diffusion.attention import kernels
print(json.dumps([[name, kernel.exactness, kernel.available()] for name, kernel in kernels().items()]))
"""


def env() -> None:
    """List versions, devices, and every attention kernel with why it is or is not usable.

    torch, diffusers and the kernels are tried in processes of their own, so that a broken one is reported here and breaks
    nothing.
    """
    from rich.console import Console

    from .show import table

    console = Console()
    made = table("package", "version")
    made.add_row("python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")
    for name, version in versions(*PACKAGES).items():
        made.add_row(name, version)
    console.print(made)
    console.print()
    _print(console, devices())
    error = broken("import diffusers")
    console.print(f"import diffusers: {'works' if error is None else 'FAILS: ' + error}", soft_wrap=True, markup=False)
    console.print()
    _print(console, kernels())


def versions(*names: str) -> dict[str, str]:
    """Distribution -> version, without importing any of them."""
    found = {}
    for name in names:
        if name == "chitu-diffusion":
            found[name] = __version__  # also right in a checkout that was never installed
            continue
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> Any:
    """The devices that torch sees as a table, or a line that says why it sees none."""
    from .show import table

    data, error = probe(DEVICES)
    if error is not None:
        return f"import torch: FAILS: {error}"
    made = table("device", "name", "")
    made.add_row(
        "cpu", platform.processor() or platform.machine(), f"{data['threads']} threads, CUDA of torch: {data['cuda']}"
    )
    for row in data["devices"]:
        made.add_row(*row)
    return made


def kernels() -> Any:
    """The attention kernels as a table, or a line that says why they cannot be listed."""
    from .show import table

    data, error = probe(KERNELS)
    if error is not None:
        return f"attention kernels: cannot be tried: {error}"
    made = table("attention kernel", "exactness", "usable here")
    for name, exactness, reason in data:
        made.add_row(name, exactness, "yes" if reason is None else f"no: {reason}")
    return made


def _print(console: Any, what: Any) -> None:
    console.print(what, soft_wrap=isinstance(what, str), markup=not isinstance(what, str))


def probe(code: str) -> tuple[Any, str | None]:
    """Run `code` in a process of its own: the JSON on its last line of output, or the last line of its error."""
    try:
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode == 0:
        lines = done.stdout.strip().splitlines()
        return json.loads(lines[-1]) if lines else None, None
    return None, error_line(done.stderr, done.returncode)


def broken(code: str) -> str | None:
    """The error of `code` in a process of its own, or None if it works."""
    return probe(code + "\nprint('null')")[1]


def error_line(stderr: str, code: int) -> str:
    """The line of a traceback that says what is wrong; tracebacks of lazy imports go on after it."""
    lines = [line.strip() for line in stderr.strip().splitlines() if line.strip()]
    errors = [
        line for line in lines if line.split(":")[0].endswith(("Error", "Exception")) and " " not in line.split(":")[0]
    ]
    if errors:
        return errors[-1]
    return lines[-1] if lines else f"exit code {code}"
