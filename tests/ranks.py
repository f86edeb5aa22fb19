"""Functions run on real gloo ranks: one spawn for many cases, since starting a rank costs more than most cases."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60) -> list[Any]:
    """What ``function(rank, *args)`` returned on each rank, within a process group of gloo.

    Raises:
        AssertionError: it raised on some rank; the message has every traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (function, ranks, args, folder, timeout), nprocs=ranks)
        found = [pickle.loads((Path(folder) / f"rank-{rank}").read_bytes()) for rank in range(ranks)]
    raised = [f"rank {rank}:\n{text}" for rank, (well, text) in enumerate(found) if not well]
    assert not raised, "\n".join(raised)
    return [value for _, value in found]


def divided(work: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """What each of the functions returns, on every rank, each called on one of them: what one process gives, to compare with."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {key: function() for number, (key, function) in enumerate(work.items()) if number % ranks == rank}
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, mine)
    return {key: value for part in found for key, value in part.items()}


def _rank(rank: int, function: Callable[..., Any], ranks: int, args: Any, folder: str, timeout: float) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    store.set(f"up {rank}", "")
    store.wait([f"up {other}" for other in range(ranks)], timedelta(seconds=180))  # imports take their time
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    try:
        with torch.no_grad():
            found = True, function(rank, *args)
    except Exception:
        found = False, traceback.format_exc()
    (Path(folder) / f"rank-{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
