"""Starting one process a rank on this machine, with torch's elastic launcher, and ending all of them together.

The first rank has the terminal; what the others print goes to files. A rank that fails writes down why and stays silent, and
the launcher tells it once: of several failures the one that the others followed from.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCHED = "CHITU_LAUNCHER"
"""Environment variable of a rank: the launcher's process."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of a rank, set by torch: where to write why it failed."""
GRACE = 5
"""Seconds between asking ranks to end and ending them."""
LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket",
    "nccl",
    "gloo",
    "timed out",
)
"""What messages of a rank say that has lost another one."""

at_end: list[Callable[[], Any]] = []
"""What a rank does before it is ended by force: removing half-written files."""


@dataclass(frozen=True)
class Failure:
    """Why a run ended.

    Attributes:
        rank: the rank that failed first.
        message: one sentence.
        code: the exit code of the run: 2 for a user's mistake.
        details: a traceback, or what the rank printed last.
    """

    rank: int | None
    message: str
    code: int = 1
    details: str = ""


def launch(command: list[str], ranks: int) -> Failure | None:
    """Run ``python command`` on `ranks` ranks of this machine and wait for all of them.

    The port is a free one, so launches side by side do not meet.

    Returns:
        Why it failed, or None.

    Raises:
        KeyboardInterrupt: it was interrupted, and every rank has ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ[LAUNCHED] = str(os.getpid())
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    # What torch's C++ part warns of when the other end of a connection is gone is a consequence, and no message of its own.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.CRITICAL)  # this process only waits; what there is to tell, it tells itself
    with tempfile.TemporaryDirectory(prefix="chitu-ranks-") as folder:
        others = {rank: Std.ALL for rank in range(1, ranks)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_configs={"is_host": True},
            run_id=f"chitu-{os.getpid()}",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.2,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=others or Std.NONE),
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return _first_cause(list(error.failures.values()), Path(folder))
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            return Failure(None, f"ended by {error.sigval.name}; nothing was written", 128 + error.sigval)
        finally:
            logging.disable(logging.NOTSET)
    return None


def _first_cause(failures: list[Any], folder: Path) -> Failure:
    """The failure that the others followed from: a mistake, a rank that was killed, a bug; a lost connection only last."""
    told = [(_told(failure), failure) for failure in failures]
    (record, failure) = min(told, key=lambda pair: (_blame(*pair), pair[0].get("time", 0.0)))
    rank = failure.local_rank
    if record:
        return Failure(rank, record["message"], record["code"], record["details"])
    if failure.exitcode < 0:
        return Failure(rank, f"rank {rank} was killed by {failure.signal_name()} (process {failure.pid})", 1)
    tail = _tail(folder, rank)
    return Failure(rank, f"rank {rank} ended with exit code {failure.exitcode}", 1, tail)


def _blame(record: dict[str, Any], failure: Any) -> int:
    if record:
        return 0 if record["code"] == 2 else 3 if record["lost"] else 2
    stopped = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM) or failure.exitcode == -signal.SIGKILL
    if failure.exitcode == -signal.SIGKILL:
        return 1  # by the kernel, say, for want of memory; the launcher's own comes after every other failure
    return 4 if stopped else 1


def _told(failure: Any) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(failure.error_file).read_text())["chitu"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _tail(folder: Path, rank: int) -> str:
    files = sorted(folder.rglob(f"{rank}/stderr.log"))
    return "\n".join(files[-1].read_text(errors="replace").splitlines()[-15:]) if files else ""


# -- inside a rank -----------------------------------------------------------------------------------------------------


def write_failure(error: BaseException, code: int) -> None:
    """Leave for the launcher why this rank fails."""
    rank = os.environ.get("RANK", "0")
    text = " ".join(str(error).split())
    lost = any(word in text.lower() for word in LOST)
    message = text if code == 2 else f"rank {rank} failed: {type(error).__name__}: {text[:400]}"
    details = "" if code == 2 else "".join(traceback.format_exception(error))
    data = {"message": message, "code": code, "lost": lost, "details": details, "time": time.time()}
    path = Path(os.environ[ERROR_FILE])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"message": message, "timestamp": int(time.time()), "chitu": data}))


def end_with_launcher() -> None:
    """End this process soon after it is told to, or the launcher is gone, also while it waits for another rank.

    Python runs no signal handler while a collective waits, so a thread of its own does it.
    """
    keep_lost_exits_quiet()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    parent = os.getppid()

    def watch() -> None:
        import select

        while True:
            ready, _, _ = select.select([read], [], [], 1.0)
            told = os.read(read, 64) if ready else b""
            if signal.SIGTERM in told or signal.SIGINT in told or os.getppid() != parent:
                time.sleep(GRACE / 2)  # for the main thread to leave by itself
                for action in at_end:
                    action()
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="ends with the launcher", daemon=True).start()


def keep_lost_exits_quiet() -> None:
    """Say nothing of a `SystemExit` or `KeyboardInterrupt` that a signal raised where Python drops exceptions: in a weakref's
    callback or a ``__del__``. Python would print it as ignored; that it is lost does no harm, since a thread ends this process.
    """
    tell = sys.unraisablehook

    def hook(lost: Any) -> None:
        if not isinstance(lost.exc_value, (SystemExit, KeyboardInterrupt)):
            tell(lost)

    sys.unraisablehook = hook
