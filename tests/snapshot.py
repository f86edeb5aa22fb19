"""Everything of a pipeline that a patch could touch, by identity."""

from __future__ import annotations

from typing import Any

from torch import nn

VOLATILE = ("timesteps", "sigmas", "num_inference_steps", "_step_index", "_begin_index", "model_outputs", "_shift")
"""What the scheduler itself changes when it runs."""


def snapshot(pipe: Any, *, ran: bool = False) -> dict[str, Any]:
    """Dotted place -> the object that is there.

    Args:
        ran: a generation lies between two snapshots: what a pipeline and its scheduler change themselves is left out.
    """
    found: dict[str, Any] = {"pipe": type(pipe)}
    if not ran:
        found.update({f"pipe.{key}": value for key, value in vars(pipe).items()})
    found["pipe.keys"] = {key for key in vars(pipe) if "chitu" in key.lower() or not ran}
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            found[f"{name}.state_dict"] = tuple(component.state_dict())
            for path, module in component.named_modules(prefix=name):
                _module(path, module, found)
        elif component is not None:
            found[name] = type(component)
            _attributes(name, component, found, ran)
    return found


def _module(path: str, module: nn.Module, found: dict[str, Any]) -> None:
    found[f"{path}.class"] = type(module)
    for key, value in vars(module).items():
        found[f"{path}.{key}"] = value
        if isinstance(value, dict):
            found[f"{path}.{key}.keys"] = tuple(value)
            found.update({f"{path}.{key}[{item}]": content for item, content in value.items()})
    processor = vars(module).get("processor")
    if processor is not None:
        found[f"{path}.processor.class"] = type(processor)
        _attributes(f"{path}.processor", processor, found, False)


def _attributes(path: str, item: Any, found: dict[str, Any], ran: bool) -> None:
    attributes = {key: value for key, value in vars(item).items() if not (ran and _volatile(key, value))}
    found[f"{path}.keys"] = tuple(sorted(attributes))
    found.update({f"{path}.{key}": value for key, value in attributes.items()})


def _volatile(key: str, value: Any) -> bool:
    return key in VOLATILE or not callable(value)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The places that differ: another object, or for plain containers of names another content."""
    missing = [f"{key} came" for key in after.keys() - before.keys()]
    missing += [f"{key} went" for key in before.keys() - after.keys()]
    return missing + [f"{key} changed" for key in before.keys() & after.keys() if not _same(before[key], after[key])]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # Bound methods and the containers made by `snapshot` itself are new objects each time.
    return type(one) is type(other) and isinstance(one, (tuple, set, str, int, float)) and one == other
