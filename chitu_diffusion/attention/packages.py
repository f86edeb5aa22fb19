"""What can be said of an installed package without importing it: importing a broken one can take the process down.

Seen in the wild: xformers and flash-attn-4 installed together make ``import diffusers`` itself fail, and an extension
built for another CUDA does not load.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import torch


def find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Where a top-level module is, or None. Only that: importing it could fail, or worse."""
    try:
        return importlib.util.find_spec(module)
    except ValueError:  # it is in sys.modules and does not say where it came from
        return None


def installed(distribution: str) -> bool:
    """Whether a distribution is installed, working or not."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing(distribution: str, module: str) -> str | None:
    """Why `module` of `distribution` is not there, or None."""
    if not installed(distribution):
        return f"needs the package {distribution} (pip install {distribution})"
    if find(module) is None:
        return f"needs the module {module}, which the installed {distribution} does not have"
    return None


def version(distribution: str) -> tuple[int, ...]:
    """The leading numbers of an installed distribution's version: (2, 8) for 2.8.post1, 2.8rc1 and 2.8+cu13."""
    numbers = []
    for part in importlib.metadata.version(distribution).split("+")[0].split("."):
        digits = part[: next((i for i, letter in enumerate(part) if not letter.isdigit()), len(part))]
        if digits:
            numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def built_for_other_cuda(module: str) -> str | None:
    """Why the extension of xformers does not load: its build notes name another CUDA than torch's."""
    spec = find(module)
    notes = Path(spec.origin).with_name("cpp_lib.json") if spec is not None and spec.origin else None
    if notes is None or not notes.is_file():
        return None
    built = json.loads(notes.read_text())["version"]
    have = torch.version.cuda
    if built.get("cuda") and have and built["cuda"] // 100 != int(have.split(".")[0]):
        return f"was built for CUDA {built['cuda'] // 100} ({built['torch']}), and torch here is {torch.__version__}"
    return None
