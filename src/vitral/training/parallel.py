"""The processes of a run: their group, DDP and FSDP wrapping, collective operations, and signals to stop.

Started by torchrun; without it there is one process, and nothing here costs anything. Only the objective is ever
wrapped: calling methods of a model inside DistributedDataParallel gives silently wrong gradients.

Ctrl-C and SIGTERM: the first requests a stop after the current step, the second ends the process. Before the
first step of a run there is nothing to save, and the first signal ends it immediately.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vitral.errors import Interrupted, Terminated, UserError
from vitral.models.build import default_device

Strategy = Literal["ddp", "fsdp"]
T = TypeVar("T")
_meshes: list[DeviceMesh] = []  # of sharded objectives; torch's caches keep every one until the interpreter is gone
_REPEATED = 1.0  # seconds: `timeout` and schedulers send one signal to a process and again to its group


@dataclass(frozen=True)
class World:
    """The rank, the number of processes, and the device of this process."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def name(self) -> str:
        """The device's name, for people."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads != 1)}" if self.device.type == "cpu" else self.device.type


def init_distributed(device: str = "") -> World:
    """Join the process group that torchrun describes, or run alone. The group is left when the program ends."""
    chosen = torch.device(device) if device else default_device()
    if chosen.type == "cuda" and chosen.index is None and torch.cuda.is_available():
        chosen = default_device()  # "cuda" means another GPU in each process
    if chosen.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(chosen)  # kernels and graphs go to the current one, whatever their tensors are on
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(minutes=10))
        atexit.register(_leave)
    if not dist.is_initialized():
        return World(0, 1, chosen)
    return World(dist.get_rank(), dist.get_world_size(), chosen)


def _leave() -> None:
    """Leave the group, and end its threads while the interpreter is whole: they abort the process if they free a tensor
    when it is not.

    They end with the last reference to the group, which has to be torch's own: it releases the GIL while it joins them,
    as they may wait for it. So all others go first: wrapped objectives, also those in the traceback of a crash, and
    meshes.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()
    for mesh in _meshes:
        getattr(mesh, "_pg_registry", {}).clear()  # torch has no public way
    if dist.is_initialized():
        dist.destroy_process_group()


def wrap(objective: nn.Module, world: World, strategy: Strategy) -> nn.Module:
    """Wrap the objective: gradients averaged over processes (ddp), or weights sharded as well (fsdp)."""
    if world.size == 1:
        return objective
    if strategy == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(objective, device_ids=ids)
    layers = ("Block", "AxialBlock", "BottleneckV2", "StemBottleneck")
    blocks = [module for module in objective.modules() if type(module).__name__ in layers]
    mesh = init_device_mesh(world.device.type, (world.size,))
    _meshes.append(mesh)
    for module in (*blocks, objective):
        fully_shard(module, mesh=mesh)
    return objective


def is_sharded(wrapped: nn.Module) -> bool:
    return isinstance(wrapped, FSDPModule)


def gradient_sync(wrapped: nn.Module, last: bool) -> Any:
    """A context for one microbatch: processes exchange gradients only in the last one."""
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(last)
    if isinstance(wrapped, DistributedDataParallel) and not last:
        return wrapped.no_sync()
    return nullcontext()


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; all processes must call this then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """A tensor on the reference's device, sharded like it."""
    if not isinstance(reference, DTensor) or isinstance(tensor, DTensor):
        return tensor.to(reference.device)
    return distribute_tensor(tensor.to(reference.device), reference.device_mesh, reference.placements)


def all_reduce_sum(values: Tensor, world: World) -> Tensor:
    """The sum of a small tensor over all processes, in place."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def all_ranks(condition: bool, world: World) -> bool:
    """Whether the condition holds in all processes."""
    if world.size == 1:
        return condition
    return int(all_reduce_sum(torch.tensor(int(condition), device=world.device), world)) == world.size


def gather_rows(rows: dict[str, np.ndarray], world: World) -> dict[str, np.ndarray]:
    """Concatenate arrays of all processes in the order of ranks; every process gets the result."""
    if world.size == 1:
        return rows
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, rows)
    return {key: np.concatenate([part[key] for part in gathered]) for key in rows}


def on_rank0(action: Callable[[], T], world: World) -> T:
    """Run an action in the first process only; all processes get its value, or raise its error."""
    shared: list[Any] = [None, None]
    if world.first:
        try:
            shared = [action(), None]
        except (UserError, OSError) as error:
            shared = [None, error]
    if world.size > 1:
        dist.broadcast_object_list(shared)
    value, error = shared
    if error is not None:
        raise error
    return value


def check_batch(batch: int, world: World) -> None:
    """Refuse a batch with fewer rows than processes: one without a row would leave the others waiting."""
    if batch < world.size:
        raise UserError(f"a batch of {batch} images is too small for {world.size} processes: choose a larger one.")


class StopRequests:
    """Whether a stop was requested. The loop asks after each step; until it has done so, signals end the process."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.requested = False
        self._notify = notify
        self._notified = threading.Event()
        self._stepping = False
        self._requested_at = 0.0
        self.signal = signal.SIGINT  # the first one received

    def __call__(self) -> bool:
        self._stepping = True
        return self.requested

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if not self.requested:
            self.requested, self._requested_at, self.signal = True, time.monotonic(), signal.Signals(number)
            if not self._stepping:
                raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
            # The display may need a lock that the interrupted code holds; threading.Thread takes one, too.
            _thread.start_new_thread(self._notify_user, ())
        elif time.monotonic() - self._requested_at > _REPEATED:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def _notify_user(self) -> None:
        try:
            self._notify()
        finally:
            self._notified.set()

    def wait_until_notified(self) -> None:
        """Wait, so that the message does not come after the end of the run."""
        if self.requested and self._stepping:
            self._notified.wait(10.0)  # a display that is stuck must not keep the program


@contextmanager
def stop_requests(notify: Callable[[], None] = lambda: None) -> Iterator[StopRequests]:
    """Handle signals while the context lasts; the earlier handlers are restored afterwards.

    `notify` is called immediately, in a separate thread, when a stop after the current step is requested.
    """
    requests = StopRequests(notify)
    if threading.current_thread() is not threading.main_thread():  # a notebook's or a server's thread gets no signals
        yield requests
        return
    before = {number: signal.signal(number, requests.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    except Interrupted as stop:
        stop.exit_code = 128 + requests.signal
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        requests.wait_until_notified()
