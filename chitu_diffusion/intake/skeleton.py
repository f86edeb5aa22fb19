"""A pipeline without weights: the real class, with its denoisers and VAE on torch's meta device."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import IntakeError, told

Classes = dict[str, type]
"""Component -> its class; components whose class cannot be known are left out."""

AROUND = ("vae", "vqvae", "vqgan", "image_encoder", "safety_checker")
"""Components that a pipeline can be looked at without."""


def from_class(cls: type) -> tuple[Any, Classes]:
    """A pipeline of `cls` whose diffusers modules have their classes' default configurations.

    Raises:
        IntakeError: none of its modules can be built from defaults.
    """
    import torch

    classes = annotated_classes(cls)
    parts: dict[str, Any] = {}
    failures = []
    for name, component in classes.items():
        if not _is_diffusers(component):
            continue
        try:
            parts[name] = _on_meta(component, {})
        except Exception as error:  # many configurations have no defaults that fit together
            failures.append(f"{name} ({component.__name__}): {told(error)}")
            if issubclass(component, torch.nn.Module) and not name.startswith(AROUND):
                raise IntakeError(
                    f"{cls.__name__} cannot be built from defaults, {failures[-1]}; give a folder with its configurations, "
                    "or a Python file with build()"
                ) from error
    return _assemble(cls, parts, failures), classes


def from_folder(folder: Path, cls: type) -> tuple[Any, Classes]:
    """A pipeline of `cls` with the configurations that stand in `folder`; no weights are read or needed.

    Raises:
        IntakeError: a configuration cannot be read, or does not fit the class that is named for it.
    """
    import diffusers
    import transformers

    index = read_json(folder / "model_index.json")
    classes, parts, plain = {}, {}, {}
    for name, value in index.items():
        if name.startswith("_"):
            continue
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)):
            plain[name] = None if isinstance(value, list) else value
            continue
        library = {"diffusers": diffusers, "transformers": transformers}.get(value[0])
        component = getattr(library, value[1], None) if library is not None else None
        if not isinstance(component, type):
            continue
        classes[name] = component
        if _is_diffusers(component):
            file = next((f for f in ("config.json", "scheduler_config.json") if (folder / name / f).is_file()), None)
            if file is None:
                raise IntakeError(
                    f"{str(folder)!r} has no {name}/config.json, which describes its {component.__name__}"
                )
            try:
                parts[name] = _on_meta(component, read_json(folder / name / file))
            except IntakeError:
                raise
            except Exception as error:
                raise IntakeError(
                    f"{str(folder)!r}: {component.__name__} cannot be built from {name}/{file}: {told(error)}"
                ) from error
    return _assemble(cls, parts | plain, []), {**annotated_classes(cls), **classes}


def annotated_classes(cls: type) -> Classes:
    """Component -> class, as the annotations of the pipeline's `__init__` say."""
    init: Any = inspect.getattr_static(cls, "__init__")
    try:
        hints = typing.get_type_hints(init)
    except Exception:  # an annotation names something that is not installed
        hints = {}
    parameters = inspect.signature(init).parameters
    found = {}
    for name in list(parameters)[1:]:
        candidates = [c for c in _flat(hints.get(name, parameters[name].annotation)) if _is_component(c)]
        if candidates:
            found[name] = candidates[0]
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        IntakeError: it cannot be read, or is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IntakeError(f"{str(path)!r} cannot be read: {told(error)}") from None
    if not isinstance(data, dict):
        raise IntakeError(f"{str(path)!r} is no JSON object")
    return data


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Without what diffusers prints and warns about components that are not there, or about tiny ones."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _flat(hint: Any) -> list[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        return [hint]
    return [cls for argument in typing.get_args(hint) for cls in _flat(argument)]


def _is_component(cls: type) -> bool:
    """Whether `cls` is a class of diffusers or transformers that could be a component."""
    return cls.__module__.partition(".")[0] in ("diffusers", "transformers")


def _is_diffusers(cls: type) -> bool:
    return cls.__module__.startswith("diffusers.") and hasattr(cls, "from_config")


def _on_meta(cls: Any, config: dict[str, Any]) -> Any:
    """A module of `cls` on the meta device, or a scheduler as it is."""
    import torch

    if not issubclass(cls, torch.nn.Module):
        return cls.from_config(config)
    with torch.device("meta"), hushed():
        return cls.from_config(config).eval() if config else cls().eval()


def _assemble(cls: Any, parts: dict[str, Any], failures: list[str]) -> Any:
    import torch

    if not any(isinstance(part, torch.nn.Module) for part in parts.values()):
        reason = failures[0] if failures else "its __init__ names no class of diffusers"
        raise IntakeError(
            f"no {cls.__name__} can be made from its class alone ({reason}); give a folder with its configurations, or a "
            "Python file with build()"
        )
    parameters = {n: p for n, p in list(inspect.signature(cls.__init__).parameters.items())[1:]}
    required = {name: None for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    known = {name: part for name, part in parts.items() if name in parameters}
    with hushed():
        try:
            return cls(**{**required, **known})
        except Exception:  # an __init__ that asks its text encoder or tokenizer something
            pipe = cls.__new__(cls)
            optional = {name: None for name in getattr(cls, "_optional_components", ()) if name in parameters}
            pipe.register_modules(**{**required, **optional, **known})
            return pipe
