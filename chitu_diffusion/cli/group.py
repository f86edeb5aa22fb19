"""How the command ends: a user's mistake is one line on stderr and exit code 2, an interrupt 130, a bug a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup


def _class_above(name: str) -> type[Exception]:
    """A class of click by name: some versions of typer bring their own copy of click."""
    return next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == name)


CLICK_ERROR = _class_above("ClickException")


class UserError(Exception):
    """A mistake in what was typed, that is found before the runtime is imported."""


class Group(TyperGroup):
    """The root command."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and in `standalone_mode` end the process with the right code."""
        options: dict[str, Any] = {"windows_expand_args": windows_expand_args, **extra}
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **options)
        try:
            code = super().main(args, prog_name, complete_var, False, **options)
        except CLICK_ERROR as error:
            _fail(error)
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except Exception as error:
            mistake = isinstance(error, UserError) or _is_chitu_error(error)
            if is_rank():
                _leave_to_launcher(error, 2 if mistake else 1)
            if not mistake:
                raise
            say(error)
            sys.exit(2)
        if code == 130 and not is_rank():
            say("interrupted; nothing was written")
        sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Any) -> None:
    """End after a usage error of click's: its message without the box around it."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        context = getattr(error, "ctx", None)
        help_of = f"; {context.command_path} --help lists what there is" if context is not None else ""
        say(error.format_message().rstrip(".") + help_of)
    sys.exit(2)


def is_rank() -> bool:
    """Whether this process is one of those that `chitu run` has started, and that leave the telling to it."""
    return "CHITU_LAUNCHER" in os.environ and "TORCHELASTIC_ERROR_FILE" in os.environ


def _leave_to_launcher(error: Exception, code: int) -> None:
    """End this rank without a word: its launcher tells why, once for all ranks."""
    from chitu_diffusion.parallel.launch import write_failure

    write_failure(error, code)
    os._exit(code)  # what ends in order would wait for the other ranks


def _is_chitu_error(error: Exception) -> bool:
    """Whether `error` is a `ChituError`, without importing the engine to find out."""
    return any((cls.__module__, cls.__name__) == ("chitu_hooks.errors", "ChituError") for cls in type(error).__mro__)


def say(what: object) -> None:
    """One line on stderr."""
    print(f"chitu: {' '.join(str(what).split())}", file=sys.stderr)
