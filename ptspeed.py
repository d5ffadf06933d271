# SPDX-License-Identifier: MIT
"""ptspeed: the nine classic PyTorch training speed-ups, each one a plain function that is exact.

    python ptspeed.py --amp --accum 4          # train on MNIST, a summary at the end
    python ptspeed.py --compare                # which technique pays on this machine?
    python ptspeed_ddp.py --world 8            # technique 9, DistributedDataParallel

Part I is to be copied: torch and the standard library only. Part II is the job that runs it.

Words used throughout:
    batch      what the loader yields, of any structure: (x, y), a dict, a detection list
    loss_fn    loss_fn(model, batch) -> 0-d tensor, the MEAN over the batch's targets
    count      count(batch) -> number of targets in it, asked before the batch moves to the device;
               None: the length of the batch's first field
    window     the `accum` micro-batches whose gradients make one optimizer step
    amp        what mixed_precision() returned: `amp.autocast` and `amp.scaler`; None: plain float32
    rank       one of the `world` processes of a DistributedDataParallel (DDP) job
"""
import collections.abc
import contextlib
import copy
import ctypes
import dataclasses
import gc
import itertools
import math
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import (DataLoader, Dataset, DistributedSampler, IterableDataset,
                              RandomSampler, Subset, TensorDataset, default_collate,
                              default_convert)

# for Part II alone
import argparse
import functools
import io
import json
import logging
import pkgutil
import random
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import zipfile

__version__ = "0.1.0"

# ==================================================================================================
# Part I: the techniques, in the order in which a run meets them
# ==================================================================================================


# ---- the device and its memory -------------------------------------------------------------------

def pick_device(device=None):
    """The device asked for, or else the accelerator that is really here, or else the CPU.

    Raises: ValueError when it is unknown or absent.
    """
    here = torch.accelerator.is_available()  # current_accelerator() alone names absent ones
    accelerator = torch.accelerator.current_accelerator() if here else torch.device("cpu")
    try:
        device = accelerator if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"unknown device {device!r}: try cpu or cuda:0") from None
    if device.type == "cpu":
        return torch.device("cpu")  # there is one; to("cpu:0") would copy what is there already
    if device.type != "meta":
        n = torch.accelerator.device_count() if device.type == accelerator.type else 0
        if (device.index or 0) >= n:
            raise ValueError(f"no device {device} here, but {n} of its kind: try {accelerator}")
    return device


def _device_of(model):
    """Where a model wants its input: the device of its first parameter."""
    return next(model.parameters(), torch.empty(0)).device


def keep_freed_memory():
    """Makes this process keep the CPU memory that it frees, as torch does with a GPU's.

    Why: glibc gives large tensors back to the system, and the next step takes a page fault for
        every 4 KiB of them. Without these faults a step of resnet18 in bfloat16 at batch 8 was
        1.16 times as fast, one of cnn() at batch 512 1.37 times (2 cores, torch 2.14, n = 5).
    Returns: whether the C library could be told, which glibc alone can.
    Limits: holds for the whole process, which may need a tenth more memory. Not for GPU training.
        A fork shares that memory, which then is copied page by page: make_loader's loaders give
        the free part back first (an epoch of 10 batches of resnet18, 2 workers: 1.21 times).
    Source: mallopt(3); Performance Tuning Guide (memory allocators).
    """
    mmap_max, trim_threshold = -4, -1  # from malloc.h
    return bool(_libc("mallopt", mmap_max, 0) and _libc("mallopt", trim_threshold, -1))


def _libc(function, *values):
    """Calls a function of the C library; None where it has no such function."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        return getattr(ctypes.CDLL(None), function)(*values)


# ---- 1 DataLoader, 2 num_workers -----------------------------------------------------------------

def make_loader(dataset, batch_size, *, shuffle=False, sampler=None, num_workers=None, device=None,
                seed=0, **kwargs):
    """A DataLoader with the right settings for this dataset on this machine.

    Why: tensors in memory are fetched by one indexing operation per batch, not one per sample;
        pinned memory makes copies to a GPU asynchronous; workers decode while the device computes.
    Args: num_workers: None means 0 for tensors in memory, else usable_cpus();
        device: where the batches will go (None: see pick_device); seed: of shuffle and workers;
        kwargs: any option of DataLoader. Those that only workers need are dropped without workers.
    Returns: a DataLoader, in the same order for any number of workers, another in each epoch.
    Raises: ValueError when drop_last would leave no batch, or when options contradict each other.
    Limits: an IterableDataset gets at most 1 worker, as each worker would yield all of it; pass
        a `worker_init_fn` to say that you shard it yourself. Datasets that already yield tensors
        on the GPU need pin_memory=False.
    Source: pytorch.org/docs/stable/data.html; Performance Tuning Guide.
    """
    stream, tensors = isinstance(dataset, IterableDataset), in_memory(dataset)
    if shuffle and (stream or sampler is not None or kwargs.get("batch_sampler") is not None):
        raise ValueError("shuffle=True contradicts an IterableDataset, a sampler or batch_sampler:"
                         " it is they who choose the order")
    if num_workers is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        num_workers = 0 if tensors else 1 if stream else usable_cpus(ranks)
    if stream and num_workers > 1 and kwargs.get("worker_init_fn") is None:
        warnings.warn("1 worker for this IterableDataset: each further one would yield all of it"
                      " again; if it shards itself, pass a worker_init_fn to say so", stacklevel=2)
        num_workers = 1
    if num_workers == 0:
        for option in ("prefetch_factor", "persistent_workers", "multiprocessing_context",
                       "timeout", "in_order"):
            kwargs.pop(option, None)
    pinnable = pick_device(device).type in ("cuda", "xpu") and all(t.is_cpu for t in tensors)
    kwargs["pin_memory"] = pinnable and kwargs.get("pin_memory", True)
    if shuffle:  # a generator of the caller's is asked, as DataLoader would
        sampler = (RandomSampler(dataset, generator=kwargs["generator"]) if "generator" in kwargs
                   else Shuffle(dataset, seed=seed))
    kwargs.setdefault("generator", torch.Generator().manual_seed(seed))
    if kwargs.get("batch_sampler") is not None:
        return _Loader(dataset, sampler=sampler, num_workers=num_workers, **kwargs)
    order = dataset if sampler is None else sampler
    if (kwargs.get("drop_last") and batch_size and hasattr(order, "__len__")
            and len(order) < batch_size):
        raise ValueError(f"{len(order)} samples with batch_size {batch_size} and drop_last make no"
                         " batch at all: lower batch_size or leave drop_last out")
    if tensors and kwargs.get("collate_fn") is None:
        dataset = _WholeBatches(dataset, range(len(dataset)))
        kwargs["collate_fn"] = default_convert  # these batches are whole already
    return _Loader(dataset, batch_size, sampler=sampler, num_workers=num_workers, **kwargs)


def in_memory(dataset):
    """The tensors of a TensorDataset or of a Subset of one; () for any other dataset."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    plain = all(getattr(type(dataset), name, None) is getattr(TensorDataset, name, None)
                for name in ("__getitem__", "__getitems__"))
    return dataset.tensors if plain else ()


class Shuffle(DistributedSampler):
    """A rank's equal share of one shuffle that is common to all ranks; each pass is a new epoch."""

    def __init__(self, dataset, num_replicas=1, rank=0, seed=0):
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)

    def __iter__(self):
        order = super().__iter__()
        self.epoch += 1  # so that a caller who forgets set_epoch still gets another order
        yield from order  # lazy, as DataLoader makes iterators that it never uses


class _Loader(DataLoader):
    """A DataLoader that trusts the number of workers that it was given."""

    def check_worker_number_rationality(self):
        """No warning: usable_cpus() counts better, and a caller may try more on purpose."""

    def __iter__(self):
        """Workers are born deaf to Ctrl-C, which the main process gets, and then ends them.

        Before that, free memory goes back: this process would have to copy what workers share.
        """
        if self.num_workers and not self.persistent_workers:
            _libc("malloc_trim", 0)
        if not hasattr(signal, "pthread_sigmask"):
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _WholeBatches(Subset):
    """Fetches a whole batch of tensors in memory with one indexing operation per tensor."""

    def __getitems__(self, indices):  # DataLoader's fetcher asks for this one first
        dataset = self.dataset
        while type(dataset) is Subset:
            dataset, indices = dataset.dataset, [dataset.indices[i] for i in indices]
        # a list of tensors would index dimensions, and one of bytes would be a mask
        return dataset[torch.as_tensor(indices, dtype=torch.long)]


def usable_cpus(local_world_size=1, *, root="/"):
    """The number of CPUs that this process may really use, at least 1.

    Why: os.cpu_count() says 64 in a container that may use 2, and 64 workers then fight for them.
    Args: local_world_size: the ranks on this host, which share the CPUs; root: of the files read.
    Returns: int, from the affinity mask and the CPU quotas of this cgroup (v1, v2) and its parents.
    Source: docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max), cgroup-v1 (cpu.cfs_quota_us).
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, int(min(cpus, _cpu_quota(Path(root)))) // max(1, local_world_size))


def _cpu_quota(root):
    """CPUs (a float, inf without a limit) that the cgroups of this process allow."""
    def read(path):
        """The text of a file, empty when it cannot be read."""
        with contextlib.suppress(OSError):
            return path.read_text(errors="replace")
        return ""

    quota = math.inf
    # Lines are id:controllers:path, v2's without controllers. In a container the path may be the
    # host's; then only the mount's own root is visible, so that is looked at too.
    for line in ["0::/", "0:cpu:/", *read(root / "proc/self/cgroup").splitlines()]:
        _, controllers, group = line.split(":", 2)
        mounts = {controllers, "cpu", "cpu,cpuacct"} if controllers else {"", "unified"}
        if controllers and "cpu" not in controllers.split(","):
            continue
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for mount, depth in itertools.product(mounts, range(len(parts) + 1)):
            folder = root.joinpath("sys/fs/cgroup", mount, *parts[:depth])
            limit = (read(folder / "cpu.max") or read(folder / "cpu.cfs_quota_us") + " "
                     + read(folder / "cpu.cfs_period_us")).split()
            with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", or no such file
                most, period = map(int, limit)
                quota = min(quota, most / period if most > 0 else math.inf)
    return quota


# ---- 3 batch size and learning rate --------------------------------------------------------------

def measure(step, *, seconds):
    """Calls step() for about that many seconds after a warm-up; returns steps per second."""
    def run(n):
        """Seconds for n steps."""
        start = time.perf_counter()
        for _ in range(n):
            step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # kernels run on after step() has returned
        return time.perf_counter() - start

    run(1)
    n = max(1, round(seconds / max(run(1), 1e-6)))
    return n / run(n)


def find_batch_size(step, *, start=1, limit=8192, gain=1.05):
    """The batch size, doubling from `start`, where throughput stops rising or memory ends.

    Why: a batch that fills the device keeps it busy; beyond that a larger one only costs memory.
    Args: step: step(n) trains once on a batch of n samples; limit: the largest size to try;
        gain: by which factor a doubled batch must raise the samples per second.
    Returns: int, the size (at most limit).
    Raises: MemoryError when not even one sample fits; any other error of step passes through.
    Limits: it looks at speed alone; how large a batch still learns well is another question.
    Source: McCandlish et al. 2018, arXiv 1812.06162; PyTorch FAQ (out-of-memory recovery).
    """
    if not 1 <= start <= limit:
        raise ValueError(f"need 1 <= start <= limit, got start={start} and limit={limit}")
    best, best_speed, size = 0, 0.0, start  # best: 0 until a size has run
    while size > best:
        speed = _samples_per_s(step, size)
        if speed is not None and speed < gain * best_speed:  # by a busy machine? ask both again
            best_speed = _samples_per_s(step, best) or best_speed
            speed = _samples_per_s(step, size)
        if speed is None:
            limit = size // 2
            gc.collect()
            if torch.accelerator.is_available():
                torch.get_device_module(pick_device()).empty_cache()
        elif speed < gain * best_speed:
            break
        else:
            best, best_speed = size, speed
        size = min(2 * best or limit, limit)
    if not best:
        raise MemoryError("out of memory even with a batch of 1: use a smaller model or input")
    return best


def _samples_per_s(step, n):
    """Throughput at batch size n, or None when memory ended."""
    try:
        return n * measure(lambda: step(n), seconds=0.2)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
    return None  # outside the handler, whose traceback keeps the failed tensors alive


def is_out_of_memory(error):
    """Whether an exception says that the device's or the host's memory ended."""
    signs = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED",
             "annot allocate memory", "bad_alloc", "bad allocation", "Invalid buffer size")
    return (isinstance(error, (torch.OutOfMemoryError, MemoryError)) or isinstance(
        error, (RuntimeError, OSError)) and any(sign in str(error) for sign in signs))


def scale_lr(base_lr, batch_size, base_batch_size=256, *, adaptive=False):
    """The learning rate for a global batch, from the one that is right for base_batch_size.

    Why: k times the batch makes k times fewer steps, so each may go further.
    Args: batch_size: the GLOBAL one in samples: micro-batch * accum * world;
        adaptive: True for Adam and its kind.
    Returns: base_lr * k for SGD, base_lr * sqrt(k) for adaptive optimizers.
    Limits: needs a warm-up, and holds up to a few thousand samples at most.
    Source: Goyal et al. 2017, arXiv 1706.02677 (linear); Krizhevsky 2014, 1404.5997 and
        Malladi et al. 2022, 2205.10287 (square root).
    """
    if not (batch_size > 0 and base_batch_size > 0 and math.isfinite(base_lr)):
        raise ValueError(f"need positive batch sizes and a finite rate, got lr {base_lr},"
                         f" batch {batch_size}, base batch {base_batch_size}")
    ratio = batch_size / base_batch_size
    return base_lr * (math.sqrt(ratio) if adaptive else ratio)


# ---- 6 to the GPU --------------------------------------------------------------------------------

def to_gpu(obj, device=None):
    """Moves every tensor in any nesting of containers to the device (None: see pick_device).

    Why: from pinned memory the copy is asynchronous, and the host goes on to the next kernel.
    Args: obj: list, deque, tuple, namedtuple, dict (and their kind), dataclass, anything with
        `.to(device)`; whatever else it holds comes back as the same object.
    Returns: the same structure and types; a tensor that is there already is not copied.
    Raises: ValueError for an absent device.
    Limits: never call empty_cache() in a loop: it gives your own program no memory and stalls.
    Source: PyTorch CUDA semantics notes (pinned memory, asynchronous execution).
    """
    device = pick_device(device)

    def move(x):
        """One object on the device, or NotImplemented for what only may contain such objects."""
        if isinstance(x, torch.Tensor):  # towards the CPU it could be read before it has arrived
            return x.to(device, non_blocking=device.type in ("cuda", "xpu"))
        to = None
        with contextlib.suppress(Exception):  # a __getattr__ may raise anything
            to = x.to
        if isinstance(x, type) or not callable(to):
            return NotImplemented
        moved = to(device)
        return x if moved is None else moved

    return _map(move, obj)


CONTAINERS = (tuple, list, collections.UserList, collections.deque,
              collections.abc.MutableMapping)


def _map(fn, obj, *others):
    """Rebuilds a nesting with fn applied to what it accepts; NotImplemented means: look inside.

    others: nestings of the same structure, whose parts are fn's further arguments.
    """
    done = fn(obj, *others)
    if done is not NotImplemented:
        return done
    if isinstance(obj, tuple):
        items = [_map(fn, *group) for group in zip(obj, *others)]
        return obj._make(items) if hasattr(obj, "_make") else type(obj)(items)
    if isinstance(obj, CONTAINERS):
        new = copy.copy(obj)
        for key in obj if isinstance(obj, collections.abc.Mapping) else range(len(obj)):
            new[key] = _map(fn, obj[key], *[o[key] for o in others])
        return new
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        new = copy.copy(obj)
        for name in [f.name for f in dataclasses.fields(obj) if hasattr(obj, f.name)]:
            value = _map(fn, getattr(obj, name), *[getattr(o, name) for o in others])
            object.__setattr__(new, name, value)  # because it may be frozen
        return new
    return obj


# ---- 7 mixed precision ---------------------------------------------------------------------------

class Amp(NamedTuple):
    """Mixed precision as the steps use it; both parts do nothing when it is off."""
    autocast: Any
    scaler: torch.amp.GradScaler


def mixed_precision(device, dtype="auto"):
    """Autocast and gradient scaler for a device.

    Why: half the bytes and tensor cores; float16 needs a scaler, or small gradients become 0.
    Args: dtype: "auto" (bfloat16 where the hardware has it, else float16), torch.bfloat16,
        torch.float16, or None for off.
    Returns: Amp(autocast, scaler); the scaler is on for float16 alone.
    Raises: ValueError for an absent device or another dtype.
    Limits: float16 is slow on a CPU (a step of cnn() takes 8 times as long as in bfloat16: torch
        2.14, 2 cores, n = 5), so "auto" never chooses it there.
    Source: Micikevicius et al. 2017, arXiv 1710.03740; PyTorch AMP notes.
    """
    device = pick_device(device)
    if dtype == "auto":
        emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(
            including_emulation=False)
        dtype = torch.float16 if emulated else torch.bfloat16
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"mixed precision is 'auto', bfloat16, float16 or None, not {dtype!r}")
    off = dtype in (None, torch.float32)
    return Amp(contextlib.nullcontext() if off else torch.autocast(device.type, dtype),
               torch.amp.GradScaler(device.type, enabled=dtype is torch.float16))


class StepResult(NamedTuple):
    """What a step returns. None of it holds a graph."""
    loss: torch.Tensor                  # 0-d float32 on the device: mean over this rank's targets
    count: int                          # the number of these targets
    stepped: bool                       # False: the scaler found inf or nan, nothing has moved
    grad_norm: torch.Tensor | None      # 0-d, before clipping; None without max_norm


def amp_step(model, batch, loss_fn, optimizer, amp=None, *, max_norm=None, count=None):
    """One training step on one batch, in mixed precision if `amp` says so: see accumulate_step."""
    return accumulate_step(model, [batch], loss_fn, optimizer, amp, max_norm=max_norm, count=count)


# ---- 4 gradient accumulation, 5 keep no graph ----------------------------------------------------

def accumulate_step(model, batches, loss_fn, optimizer, amp=None, *, max_norm=None, count=None):
    """One optimizer step on several micro-batches, equal to one on their concatenation.

    Why: the gradient of a large batch in the memory of a small one. Each micro-batch weighs what
        it holds of the window's targets, so sizes may differ and the last window may be short.
    Args: batches: iterable of micro-batches, moved to the model's device one at a time;
        max_norm: clips the norm of the whole gradient, after unscaling.
    Returns: StepResult. Under DDP the gradient is that of the mean over all ranks' targets, with
        one all-reduce of the gradients for the window.
    Raises: ValueError for a window without a target; FloatingPointError when the gradient's norm
        is not finite (float32, bfloat16), or when the scaler has skipped until nothing is left.
    Limits: BatchNorm sees micro-batches. max_norm and float16 wait for the device in every step.
        An optimizer whose step() needs a closure (LBFGS) cannot be used.
    Source: PyTorch AMP notes; Li et al. 2020, arXiv 2006.15704 (no_sync).
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"need max_norm > 0, or None for no clipping, got {max_norm}")
    amp = amp or mixed_precision("cpu", None)
    optimizer.zero_grad()  # what another backward pass has left
    batches = list(batches)
    counts = [_count_targets(batch, count) for batch in batches]
    local, device, ddp = sum(counts), _device_of(model), isinstance(model, DistributedDataParallel)
    total, world, wait = _all_targets(model, local) if ddp else (local, 1, lambda: None)
    if not local:
        wait()
        if not total:
            raise ValueError("this window holds no target at all: nothing to learn from")
    # A micro-batch without targets has the mean 0/0 and is left out; but when a rank has no other,
    # it goes through the last one for a gradient of 0, which the other ranks wait for.
    todo = [pair for pair in zip(batches, counts) if pair[1]] or [(batches[-1], 0)]
    mean = 0.0  # of this rank's losses
    try:
        for i, (batch, n) in enumerate(todo, 1):
            with model.no_sync() if ddp and i < len(todo) else contextlib.nullcontext():
                with copy.copy(amp.autocast):  # as one entered twice would stay on
                    loss = loss_fn(model, to_gpu(batch, device))
                if n == 0:  # not 0 * loss, which is nan
                    loss = sum(p.flatten()[:0].sum() for p in model.parameters()
                               if p.requires_grad)
                wait()  # for `total`, on its way from the other ranks during the first forward
                if loss.numel() != 1:
                    raise ValueError(f"loss_fn must return one mean, not {tuple(loss.shape)}")
                loss = _at_least_float32(loss).reshape(())
                mean = mean + loss.detach() * (n / max(1, local))
                # DDP averages over ranks, so this makes the sum of all n * loss / total
                amp.scaler.scale(loss * (n * world / total)).backward()
        return StepResult(mean.float(), local, *_update(optimizer, amp, max_norm))
    finally:
        optimizer.zero_grad()  # after an error too, so that nothing leaks into the next window


def _all_targets(ddp, n):
    """Starts to add up n over all ranks: (the sum to be, the ranks, what to wait with)."""
    # full(), not tensor(): a fill on the device, where a copy would wait for it
    total = torch.full((), float(n), dtype=torch.float64, device=_device_of(ddp))
    work = dist.all_reduce(total, group=ddp.process_group, async_op=True)
    return total, dist.get_world_size(ddp.process_group), work.wait


def _count_targets(batch, count):
    """The number of targets in a batch, an int."""
    if count is not None:
        n = float(count(batch))
        if not (n >= 0 and n.is_integer()):
            raise ValueError(f"count must say how many targets a batch holds, and said {n}")
        return int(n)
    if dataclasses.is_dataclass(batch):
        batch = [getattr(batch, dataclasses.fields(batch)[0].name)]
    elif isinstance(batch, collections.abc.Mapping):
        batch = list(batch.values())
    first = next(iter(batch), None) if isinstance(batch, CONTAINERS) else batch
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        raise ValueError("cannot tell how many targets this batch holds, as its first field is no"
                         " tensor with a batch dimension: pass count=..., a function of the batch")
    return len(first)


def _at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _update(optimizer, amp, max_norm):
    """Unscale, clip, step: once per window. Returns (stepped, grad_norm)."""
    scaler, grad_norm, finite = amp.scaler, None, True
    scale = scaler.get_scale()  # 1.0 when the scaler is off: no read of the device
    if max_norm is not None:
        scaler.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grad_norm = nn.utils.clip_grad_norm_(params, max_norm)
        finite = bool(torch.isfinite(grad_norm))
    if finite:
        scaler.step(optimizer)
        scaler.update()
    elif scaler.is_enabled():  # skip: the norm may overflow where no single gradient does
        scaler.update(scale * scaler.get_backoff_factor())
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})  # as its own skip
    else:
        raise FloatingPointError(f"the gradient's norm is {grad_norm.item()}; the weights are"
                                 " untouched. Try a lower learning rate or a longer warm-up")
    after = scaler.get_scale()
    if after < min(scale, 1e-4):
        raise FloatingPointError(f"the loss scale fell to {after:.1g} and gradients are still not"
                                 " finite: the loss is not. Try a lower learning rate or bfloat16")
    return after >= scale, grad_norm  # not by a hook: fused optimizers run even when they skip


class EpochResult(NamedTuple):
    """What train_epoch returns, over all ranks."""
    loss: float     # mean over all targets
    samples: int    # targets seen, skipped steps included (samples, for a classifier)
    steps: int      # optimizer steps tried, of which ...
    skipped: int    # ... so many were skipped by the scaler
    seconds: float
    wait: float     # share of the seconds in which the loop stood waiting for data


def train_epoch(model, loader, loss_fn, optimizer, *, accum=1, amp=None, scheduler=None,
                max_norm=None, count=None, log_every=50, on_log=None):
    """One epoch of accumulate_step, the short last window included.

    Why: it reads the device, and so waits for it, only for the log, once in log_every steps.
    Args: loader: any iterable of batches, each a new one; scheduler: moves with each step that
            really happened, so ReduceLROnPlateau, which wants a metric, is for you to step;
        on_log: on_log(step, loss, samples_per_s, wait), the loss being that since the last log.
    Returns: EpochResult.
    Raises: ValueError for an empty loader; FloatingPointError that names the first step (from 1)
        whose loss is not finite, found at the next log; what accumulate_step raises.
    Limits: under DDP every rank needs the same number of batches (see Shuffle).
    Source: Performance Tuning Guide (avoid synchronization).
    """
    if accum < 1 or log_every < 1:
        raise ValueError(f"need accum and log_every >= 1, got {accum} and {log_every}")
    model.train()
    batches, start, waited = iter(loader), time.perf_counter(), 0.0
    pending, steps, skipped, totals = [], 0, 0, (0.0, 0.0, 0.0)
    while True:
        asked = time.perf_counter()
        window = list(itertools.islice(batches, accum))
        waited += time.perf_counter() - asked
        if window:
            steps += 1
            try:
                step = accumulate_step(model, window, loss_fn, optimizer, amp, max_norm=max_norm,
                                       count=count)
            except FloatingPointError as error:
                raise FloatingPointError(f"step {steps}: {error}") from error
            if step.stepped and scheduler is not None:
                scheduler.step()
            skipped += not step.stepped
            pending.append(step)
        last = len(window) < accum  # and not asked for more: some iterators would start anew
        if pending and (last or len(pending) == log_every):
            new, pending = _sums(pending, model, steps), []
            totals = [a + b for a, b in zip(totals, new)]
            if on_log is not None:
                seconds = time.perf_counter() - start
                on_log(steps, new[0] / (new[1] or math.nan), totals[2] / seconds, waited / seconds)
        if last:
            break
    if not steps:
        raise ValueError("the loader yields no batch: the dataset is empty, or already used up")
    seconds = time.perf_counter() - start
    return EpochResult(totals[0] / (totals[1] or math.nan), int(totals[2]), steps, skipped,
                       seconds, waited / seconds)


def _sums(results, model, last):
    """(loss, targets, targets with skipped steps) of the results up to step `last`, of all ranks.

    One device read, for any number of results.
    """
    losses = torch.stack([r.loss if r.stepped else torch.zeros_like(r.loss) for r in results])
    counts = [[r.count * r.stepped for r in results], [r.count for r in results]]
    counts = torch.tensor(counts, dtype=losses.dtype).to(losses.device)
    table = torch.stack([losses * counts[0], *counts])
    if isinstance(model, DistributedDataParallel):
        dist.all_reduce(table, group=model.process_group)
    table = table.tolist()
    for step, loss in enumerate(table[0], last - len(results) + 1):
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {step} is {loss}: try a lower learning"
                                     " rate, a longer warm-up or max_norm, and look for bad"
                                     " values in the data")
    return [sum(row) for row in table]


@torch.no_grad()
def evaluate(model, loader, *, device=None, amp=None):
    """Loss and accuracy of a classifier on batches (x, y), summed over all ranks.

    Why: no graph is kept, and the device is read once at the end.
    Args: x: any input of the model, y: int64 [N] class indices; the model returns logits [N, C].
    Returns: (loss, accuracy, n): mean cross-entropy, share of right answers (0 to 1), samples.
    Raises: ValueError when there is no sample at all.
    Limits: once a process group exists every rank must call it, each with its own share and none
        padded: `sampler=range(rank, n, world)`.
    Source: DistributedSampler's documentation (it pads by default).
    """
    amp = amp or mixed_precision("cpu", None)
    bare, group = model, None
    if isinstance(model, DistributedDataParallel):
        # DDP's own forward broadcasts, which hangs when a rank has no sample: so the bare module
        bare, group = model.module, model.process_group
        for buffer in bare.buffers():
            dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)
    device = _device_of(bare) if device is None else pick_device(device)
    precision = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    totals = torch.zeros(3, dtype=precision, device=device)
    modes = [(module, module.training) for module in bare.modules()]
    bare.eval()
    try:
        for batch in loader:
            x, y = to_gpu(batch, device)
            if y.is_floating_point():
                raise ValueError("y must be class indices, as accuracy compares them")
            with copy.copy(amp.autocast):
                logits = bare(x)
            logits, y = _at_least_float32(logits), y.to(logits.device).long()
            loss = F.cross_entropy(logits, y, reduction="sum")
            right, counted = (logits.argmax(1) == y).sum(), (y != -100).sum()  # as the loss counts
            totals += torch.stack([loss, right, counted]).to(totals)
    finally:
        for module, mode in modes:
            module.training = mode
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(totals, group=group)
    loss, right, n = totals.tolist()
    if not n:
        raise ValueError("there is no sample to evaluate")
    return loss / n, right / n, int(n)


# ---- 8 several GPUs in one process ---------------------------------------------------------------

def wrap_dataparallel(model, device_ids=None):
    """DataParallel over the GPUs, each with a slice of every batch.

    Why: one line, one process; the batch should grow with the number of GPUs.
    Args: device_ids: indices or devices; None: all GPUs.
    Returns: the wrapped model, or the model itself with fewer than 2 GPUs to use.
    Raises: ValueError for an absent GPU.
    Limits: copies the model in every step and is bound by Python's lock: DDP (technique 9) is
        faster even on one host. BatchNorm sees slices, and keeps the first one's statistics.
    Source: torch.nn.DataParallel's documentation; Krizhevsky 2014, arXiv 1404.5997.
    """
    ids = range(torch.cuda.device_count()) if device_ids is None else device_ids
    if len(ids) < 2:
        return model
    devices = [pick_device(f"cuda:{i}" if isinstance(i, int) else i) for i in ids]
    if devices[0].type == "cpu":
        return model
    return DataParallel(model.to(devices[0]), device_ids=devices)


def split_model(stages, devices, *, chunks=1):
    """A model whose stages lie on different devices, run one after the other.

    Why: trains what does not fit on one device. With chunks > 1 the batch passes in parts, and
        one device computes a part while the next one computes the part before.
    Args: stages: modules, moved in place; devices: one per stage, a list of devices making that
        stage data-parallel over them (the hybrid of both).
    Returns: an nn.Module that takes the first stage's input and returns the last stage's output,
        on the last device.
    Raises: ValueError for lengths that differ, absent devices, and weights tied over devices.
    Limits: with chunks > 1 BatchNorm sees chunks, and the batch is the first dimension of every
        tensor that goes in or comes out; what is no tensor goes into each chunk whole. A loss
        must move its targets to the output's device.
    Source: Huang et al. 2018, arXiv 1811.06965 (GPipe).
    """
    if len(stages) != len(devices) or not stages or chunks < 1:
        raise ValueError(f"need one device per stage and chunks >= 1, got {len(stages)} stages,"
                         f" {len(devices)} devices and chunks={chunks}")
    groups = [[pick_device(d) for d in (group if isinstance(group, (list, tuple)) else [group])]
              for group in devices]
    owner = {}
    for stage, group in zip(stages, groups):
        place = group[0].type, group[0].index or 0
        for name, tensor in itertools.chain(stage.named_parameters(), stage.named_buffers()):
            if owner.setdefault(tensor, place) != place:
                raise ValueError(f"{name} is tied between stages on {owner[tensor]} and {place}:"
                                 " put both on one device")
    stages = [wrap_dataparallel(stage.to(group[0]), group) for stage, group in zip(stages, groups)]
    return _Split(stages, [group[0] for group in groups], chunks)


class _Split(nn.Module):
    """See split_model."""

    def __init__(self, stages, devices, chunks):
        super().__init__()
        self.stages, self.devices, self.chunks = nn.ModuleList(stages), devices, chunks

    def forward(self, x):
        """The stages one after the other, for one chunk after the other."""
        parts = _chunk(x, self.chunks)
        for i, part in enumerate(parts):  # kernels are queued, so the devices work side by side
            for stage, device in zip(self.stages, self.devices):
                part = stage(to_gpu(part, device))
            parts[i] = part
        return parts[0] if len(parts) == 1 else _map(_join, *parts)


def _join(part, *others):
    """The outputs for all chunks as one, for _map."""
    if isinstance(part, torch.Tensor) and part.dim():
        return torch.cat([part, *others])
    if dataclasses.is_dataclass(part) or (
            isinstance(part, CONTAINERS) and not isinstance(part, nn.utils.rnn.PackedSequence)
            and all(len(other) == len(part) for other in others)):
        return NotImplemented
    if all(other is part or isinstance(part, (int, float, str)) and other == part
           for other in others):
        return part
    raise ValueError(f"the outputs for the chunks hold a {type(part).__name__} each, which cannot"
                     " be put together: use chunks=1")


def _chunk(x, chunks):
    """Cuts every tensor in a nesting along its first dimension: a list of such nestings."""
    def each(fn):
        """fn of every tensor that has a first dimension, in the same nesting."""
        return _map(lambda t: fn(t) if isinstance(t, torch.Tensor) and t.dim() else NotImplemented,
                    x)

    lengths = []
    each(lambda t: lengths.append(len(t)))
    if chunks > 1 and len(set(lengths)) > 1:
        raise ValueError(f"cannot cut tensors of different first dimensions {lengths} in chunks")
    n = min([chunks, *lengths]) if lengths else 1
    # each chunk a copy, so that autograd counts the changes in place of each by itself
    return [each(lambda t: t.tensor_split(n)[i].clone()) for i in range(n)] if n > 1 else [x]


# ==================================================================================================
# Part II: the job
# ==================================================================================================


class RunFailed(Exception):
    """A run that cannot go on: told in one line, exit status 1."""


class BadInput(RunFailed):
    """Something that the user can mend: told in one line, exit status 2."""


@contextlib.contextmanager
def told_in_one_line(prog, quiet=False):
    """Turns an error that users can understand into one line (quiet: none) and an exit status."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        message, status = explain(error)
        if message is None:
            raise
        alike = isinstance(error, (BadInput, FloatingPointError, KeyboardInterrupt))
        if not (quiet and alike):  # what all ranks of a job say alike, one of them says
            print(f"{prog}: {message}", file=sys.stderr, flush=True)
        if isinstance(error, OSError):  # after a broken pipe Python's last flush would fail too
            sys.stdout = open(os.devnull, "w")
        raise SystemExit(status) from None


TERMINATED = 143  # the exit status after SIGTERM
REMEDIES = (  # what torch reports obscurely, what to do about it, and the exit status
    ("Too many open files", "too many open files: raise the limit (ulimit -n 4096) or lower"
     " --workers", 1),
    ("Broken pipe", "standard output was closed", 1),
    ("No space left", "no space left on the device that output or temporary files go to", 1),
    ("Expected more than 1 value per channel", "BatchNorm has no variance in a batch of 1 sample:"
     " raise --batch-size, or give it more data", 2),
    (r"Target -?\d+ is out of bounds", "a target is negative, or not below the number of classes"
     " that the data set or the model has", 2),
    ("stack expects each tensor to be equal size|storage that is not resizable", "samples of"
     " different shapes make no batch: crop or resize them in the data set", 2),
    ("Expected to have finished reduction", "some parameters take no part in the loss, and DDP"
     " waits for their gradients: take them out, or set requires_grad=False", 1),
    ("shared memory|shm|Bus error", "a loader worker ran out of shared memory: enlarge /dev/shm or"
     " use --workers 0", 1),
    ("DataLoader worker.*(exited unexpectedly|killed)", "a loader worker was killed, often because"
     " the host's memory ended: lower --workers", 1))


def explain(error):
    """The line that tells an error, or None where its traceback tells more, and the exit status."""
    text, status = " ".join(str(error).split()), 2 if isinstance(error, BadInput) else 1
    if isinstance(error, KeyboardInterrupt):
        text, status = "interrupted", 130
    elif is_out_of_memory(error):
        text = "out of memory: lower --batch-size and raise --accum by as much, or use --amp"
    elif not isinstance(error, (RunFailed, FloatingPointError)):
        text, status = next(((remedy, status) for sign, remedy, status in REMEDIES
                             if re.search(sign, text)), (None, 1))
    return text, status


def _one_line(error):
    return " ".join(f"{type(error).__name__} {error}".split())[:200]


# ---- flags ---------------------------------------------------------------------------------------

# What is always on, as it costs nothing; --compare alone switches it off, to measure it.
SWITCHES = dict.fromkeys(("whole_batches", "uint8", "detached"), True)
DTYPES = {"auto": "auto", "bf16": torch.bfloat16, "fp16": torch.float16}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, without the usage text."""
        raise BadInput(message)


def number(kind, low, *words):
    """An argparse type: a finite int or float of at least `low`, or one of the words."""
    def parse(text):
        """The value of a flag's text."""
        if text in words:
            return text
        with contextlib.suppress(ValueError):
            if low <= kind(text) < 2**31:
                return kind(text)
        whole = "whole " if kind is int else ""
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a {whole}number from {low} to {2**31 - 1}")
    return parse


def _file(text):
    if not os.path.basename(text):
        raise argparse.ArgumentTypeError(f"{text!r} names no file")
    return os.path.realpath(text)  # a link stays a link


def _device(text):
    try:
        if pick_device(text).type == "meta":
            raise ValueError("meta tensors hold no numbers to train on: try cpu")
    except ValueError as error:
        raise argparse.ArgumentTypeError(error)
    return text


def make_parser(prog="ptspeed.py"):
    """The flags that both programs share."""
    p = _Parser(prog=prog, description="Train a classifier fast, and exactly.",
                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = p.add_argument
    add("--data", default="auto", help="auto, mnist, synthetic or package.module:function that"
        " returns (train_set, test_set)")
    add("--root", default="data", help="folder of MNIST in torchvision's layout")
    add("--model", default="cnn", help="cnn, a name of torchvision.models, or"
        " package.module:function")
    add("--epochs", type=number(int, 1), default=5, help="passes over the data")
    add("--batch-size", type=number(int, 1, "auto"), default=64, metavar="N|auto",
        help="samples per device and micro-batch, or the size where speed stops rising")
    add("--accum", type=number(int, 1), default=1, help="micro-batches per step")
    add("--amp", nargs="?", const="auto", choices=DTYPES, help="mixed precision; alone: the"
        " better one for the device")
    add("--workers", type=number(int, 0), help="loader processes; None: 0 for data in memory, else"
        " the usable CPUs")
    add("--lr", type=number(float, 0), default=0.2, help="peak learning rate per 256 samples of"
        " the global batch")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--channels-last", action=argparse.BooleanOptionalAction, default=True,
        help="memory format of convolutions")
    add("--fused", action=argparse.BooleanOptionalAction, default=True, help="fused optimizer")
    add("--device", type=_device, help="such as cpu or cuda:1; None: the accelerator, or else cpu")
    add("--seed", type=number(int, 0), default=0, help="of weights, order, dropout, augmentation")
    add("--checkpoint", type=_file, metavar="FILE", help="resume from FILE, write it after each"
        " epoch")
    add("--json", action="store_true", help="the summary as one JSON object on the last line")
    p.set_defaults(parallel="none", **SWITCHES)
    return p


def changed(args, **flags):
    """The same flags but for some: a variant of the job."""
    return argparse.Namespace(**{**vars(args), **flags})


# ---- data ----------------------------------------------------------------------------------------

class Data(NamedTuple):
    """Two map-style data sets of (x, y) samples."""
    name: str
    train: Dataset
    test: Dataset
    classes: int | None  # None: unknown


def load_data(args):
    """The data that --data names."""
    if args.data == "synthetic":
        return synthetic()
    if args.data not in ("auto", "mnist"):
        return custom_data(args.data)
    try:
        return mnist(args.root)
    except FileNotFoundError as error:
        message = f"no MNIST under {args.root}, and it cannot be downloaded: {error}"
        if args.data == "mnist":
            raise BadInput(message)
        print(f"{message}; going on with the synthetic set, whose accuracy is not MNIST's")
        return synthetic()


def mnist(root):
    """MNIST from torchvision's files under root, downloaded when they are absent.

    Raises: FileNotFoundError when it cannot be had, BadInput for a damaged file.
    """
    from torchvision.datasets.mnist import MNIST, read_image_file, read_label_file
    files = [Path(root, "MNIST", "raw", f"{name}-ubyte") for name in (
        "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")]
    if not all(file.is_file() for file in files):
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(20)
        try:
            with contextlib.redirect_stdout(None):
                MNIST(root, download=True)
        except (OSError, RuntimeError) as error:
            raise FileNotFoundError(str(error).splitlines()[0].rstrip(":")) from None
        finally:
            socket.setdefaulttimeout(timeout)
    sets = []
    for file, read in zip(files, (read_image_file, read_label_file) * 2):
        try:
            new = read(file)
            right = (new.shape[1:] == (28, 28) and len(new) if read is read_image_file
                     else len(new) == len(sets[-1]) and new.max() < 10)
            if not right:
                raise ValueError("other shape or labels than MNIST's")
            sets.append(new)
        except OSError as error:
            raise BadInput(f"{file} cannot be read: {error.strerror}")
        except Exception as error:
            raise BadInput(f"{file} is damaged ({_one_line(error)}): delete it, and the next run"
                           " will fetch it again")
    return Data("mnist", TensorDataset(*sets[:2]), TensorDataset(*sets[2:]), 10)


def synthetic():
    """Ten blurred patterns under noise: uint8 [N, 28, 28] images that a model can learn."""
    g = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.rand(10, 1, 7, 7, generator=g), size=28, mode="bilinear")[:, 0]
    sets = []
    for n in (20_000, 4_000):
        y = torch.randint(10, (n,), generator=g)
        x = patterns[y] + 0.5 * torch.randn(n, 28, 28, generator=g)
        sets.append(TensorDataset(x.clamp_(0, 1).mul_(255).byte(), y))
    return Data("synthetic", *sets, 10)


def _call(flag, spec):
    """Calls the package.module:function that a flag names."""
    sys.path.insert(1, os.getcwd())  # behind this file's folder: another ptspeed.py may be there
    try:
        return pkgutil.resolve_name(spec)()
    except (Exception, SystemExit) as error:
        raise BadInput(f"{flag} {spec}: {_one_line(error)}")


def custom_data(spec):
    """The data of --data package.module:function."""
    if ":" not in spec:
        raise BadInput(f"--data {spec}: not auto, mnist, synthetic or package.module:function")
    sets = _call("--data", spec)
    try:
        train, test = sets
        if any(isinstance(part, IterableDataset) or not len(part) for part in (train, test)):
            raise ValueError("an IterableDataset, or an empty set")
        classes = [_count_classes(part) for part in (train, test)]
    except Exception as error:
        raise BadInput(f"--data {spec} must return (train_set, test_set), both with a length and,"
                       f" if they keep targets, class indices from 0 on: {_one_line(error)}")
    return Data(spec, train, test, None if None in classes else max(classes))


def _count_classes(dataset):
    """From the `classes` or targets that a data set keeps; None when it keeps neither."""
    while hasattr(dataset, "dataset"):  # Subset
        dataset = dataset.dataset
    targets = getattr(dataset, "targets", getattr(dataset, "tensors", [None])[-1])
    for target in () if targets is None else (min(targets), max(targets)):
        if not 0 <= target < 2**24:
            raise ValueError(f"a target of {int(target)}")
    known = getattr(dataset, "classes", None)
    if known is not None:
        return len(known)
    return None if targets is None else int(max(targets)) + 1


# ---- model ---------------------------------------------------------------------------------------

def cnn(num_classes=10):
    """Three 3x3 stride-2 conv-BN-ReLU blocks of 16, 32, 64 channels and a linear head."""
    layers = []
    for i, o in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, num_classes))


def build_model(args, data):
    """The bare model that --model names, the same for the same seed."""
    torch.manual_seed(args.seed)
    if ":" in args.model:
        model = _call("--model", args.model)
        if not isinstance(model, nn.Module):
            raise BadInput(f"--model {args.model} returned a {type(model).__name__}, no nn.Module")
        return model
    from torchvision import models
    if args.model not in ("cnn", *models.list_models(module=models)):
        raise BadInput(f"--model {args.model}: neither cnn, nor a classifier of torchvision.models"
                       " (such as resnet18), nor package.module:function")
    if data.classes is None:
        raise BadInput(f"--data {data.name}: how many classes? Give the training and the test set"
                       " an attribute `classes` or `targets`")
    if args.model == "cnn":
        return cnn(data.classes)
    tuples = args.model in ("googlenet", "inception_v3")  # what they return unless told otherwise
    return models.get_model(args.model, weights=None, num_classes=data.classes,
                            **{"aux_logits": False, "init_weights": True} if tuples else {})


DIGITS, PHOTOS = (0.1307, 0.3081), (0.449, 0.226)  # mean and std of MNIST and of ImageNet, of 1


class Normalize(nn.Module):
    """Goes around a model: uint8 images come in, normalised ones of its channels go on.

    So images cross to the device as bytes, a quarter of the size of float32.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        convs = (m for m in model.modules() if isinstance(m, nn.Conv2d))
        self.channels = next((conv.in_channels for conv in convs), 0)

    def forward(self, x):
        """Images of any kind to float [N, C, H, W] for a model with convolutions."""
        if x.dim() == 3 and self.channels:  # [N, H, W]
            x = x.unsqueeze(1)
        if x.dtype == torch.uint8:
            mean, std = PHOTOS if x.dim() == 4 and x.shape[1] == 3 else DIGITS
            x = x.float().sub_(255 * mean).div_(255 * std)
        if x.dim() == 4 and x.shape[1] == 1 and self.channels == 3:
            x = x.expand(-1, 3, -1, -1)
        return self.model(x)


def place_model(args, bare, device):
    """Puts the bare model on its device or devices; returns it with what goes around it."""
    if args.channels_last and all(p.dim() != 5 for p in bare.parameters()):  # no 3-d convolution
        bare.to(memory_format=torch.channels_last)
    if args.parallel == "split":
        n = 0 if device.type == "cpu" else torch.accelerator.device_count()
        stages = cut(bare, max(2, n))
        placed = split_model(stages, [f"{device.type}:{i}" if n > 1 else device
                                      for i in range(len(stages))])
    else:
        placed = bare.to(device)
    model = Normalize(placed)
    if args.parallel == "dp":
        if args.compile:
            raise BadInput("--compile does not go with --parallel dp, whose copies would all run"
                           " the first one's weights")
        return wrap_dataparallel(model, [] if device.type == "cpu" else None)
    if args.compile:  # in place and before DDP, whose wrapper would hide the model from it
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no CUDA runtime"
        model.compile()
    return model


def cut(model, n):
    """Up to n stages of an nn.Sequential with about equal numbers of parameters."""
    if not isinstance(model, nn.Sequential) or len(model) < 2:
        raise BadInput("--parallel split cuts an nn.Sequential of several layers; give any other"
                       " model's stages to split_model() yourself")
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model]
    middles = [end - size / 2 for end, size in zip(itertools.accumulate(sizes), sizes)]
    index = [min(n - 1, int(n * middle / max(1, sum(sizes)))) for middle in middles]
    return [nn.Sequential(*[layer for layer, i in zip(model, index) if i == stage])
            for stage in sorted(set(index))]


def classify(model, batch):
    """The loss_fn of the job: mean cross-entropy of logits [N, C] and class indices [N]."""
    x, y = batch
    logits = model(x)
    return F.cross_entropy(_at_least_float32(logits), y.to(logits.device))


def check_model(args, data, bare, device):
    """What place_model returns, after a forward in eval mode: what cannot work is told now."""
    try:
        model = place_model(args, bare, device).eval()
        for part in (data.test, data.train):
            batch = to_gpu(default_collate([part[i] for i in range(min(2, len(part)))]), device)
            if not classify(model, batch).requires_grad:
                raise ValueError("its loss depends on no parameter that can be trained")
        if data.classes is not None and model(batch[0]).shape[1] < data.classes:
            raise ValueError(f"fewer outputs than the {data.classes} classes")
    except (Exception, SystemExit) as error:
        if isinstance(error, BadInput) or is_out_of_memory(error):
            raise
        hint = ": try --no-channels-last" if "view size is not compatible" in str(error) else ""
        raise BadInput(f"--model {args.model} cannot train on --data {data.name}:"
                       f" {_one_line(error)}{hint}")
    return model


# ---- the training job ----------------------------------------------------------------------------

class Job:
    """What a set of flags makes of a model and its data; BadInput when the two do not fit."""

    def __init__(self, args, data, rank=0, world=1):
        self.device = device = pick_device(args.device)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
            torch.set_float32_matmul_precision("high")
        elif device.type == "cpu":
            keep_freed_memory()
        # `bare` is what is saved and loaded; what goes around it shares its parameters
        self.bare = build_model(args, data)
        self.model = check_model(args, data, self.bare, device)
        self.sampler = Shuffle(data.train, world, rank, args.seed)  # DDP: sampler
        n = len(self.sampler)
        if not n:
            raise BadInput(f"--data {data.name}: {len(data.train)} samples for {world} ranks")
        norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.bare.modules())
        self.loader = make_loader(
            data.train if args.whole_batches else PerSample(data.train), args.batch_size,
            sampler=self.sampler, num_workers=args.workers, device=device,
            drop_last=norms and n > 1 and n % args.batch_size == 1)  # one sample has no variance
        _check_shared_memory(self.loader, data)
        share = range(rank, len(data.test), world)  # unlike the training share, complete
        self.test_loader = make_loader(data.test, args.batch_size, sampler=share,
                                       num_workers=args.workers, device=device)
        self.optimizer = torch.optim.SGD(self.bare.parameters(), lr=args.lr, momentum=0.9,
                                         fused=args.fused)
        for p in self.bare.parameters():  # fused SGD wants all of them or none, also of a layer
            self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)  # that rests at first
        self.amp = mixed_precision(device, DTYPES.get(args.amp))


def _check_shared_memory(loader, data):
    """Workers that find /dev/shm full report nothing, and the job would wait for ever."""
    if loader.num_workers and os.path.isdir("/dev/shm"):
        x, _ = data.train[0]
        size = x.nbytes if isinstance(x, torch.Tensor) else 0
        need = size * loader.batch_size * loader.num_workers * loader.prefetch_factor
        if shutil.disk_usage("/dev/shm").free < need:
            raise RunFailed(f"/dev/shm has less than the {need / 2**20:,.1f} MiB free that"
                            f" {loader.num_workers} workers need: enlarge it or use --workers 0")


def auto_batch_size(args, data, world=1):
    """--batch-size auto: the size at which a copy of the job is fastest, the least of all ranks."""
    job = Job(changed(args, batch_size=1, lr=0.0), data)
    limit = max(1, min(8192, len(data.train) // world))
    job.model.train()
    samples = default_collate([data.train[i] for i in range(min(256, limit))])

    @functools.lru_cache(1)
    def batch(n):
        """n samples on the device, some of them several times."""
        return to_gpu([part[torch.arange(n) % len(part)] for part in samples], job.device)

    def step(n):
        """What find_batch_size times."""
        amp_step(job.model, batch(n), classify, job.optimizer, job.amp)

    size = torch.tensor(find_batch_size(step, start=min(32, limit), limit=limit), device=job.device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(size, dist.ReduceOp.MIN)  # DDP: on one rank memory may end earlier
    return int(size)


def lr_factor(step, total):
    """Share of the peak rate: linear warm-up over a tenth of the steps, then linear down to 0."""
    warm_up = max(1, total // 10)
    return min((step + 1) / warm_up, max(0, total - step) / max(1, total - warm_up))


def begin_epoch(args, job, epoch, rank, steps, lr):
    """Sets order, seeds and rates of an epoch from its number alone; returns the scheduler."""
    import numpy
    job.sampler.set_epoch(epoch)  # DDP: set_epoch
    mixed = random.Random(f"{args.seed} {epoch} {rank}").getrandbits(32)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed,
                 job.loader.generator.manual_seed):  # so that a resumed run draws the same
        seed(mixed)
    for group in job.optimizer.param_groups:
        group["initial_lr"] = group["lr"] = lr
    return torch.optim.lr_scheduler.LambdaLR(
        job.optimizer, functools.partial(lr_factor, total=steps * args.epochs),
        last_epoch=epoch * steps - 1)


def from_rank_0(ask):
    """What ask() returns or raises (a RunFailed) on rank 0, on every rank; all wait for it."""
    box, distributed = [None], dist.is_available() and dist.is_initialized()
    if not distributed or dist.get_rank() == 0:
        try:
            box = [ask()]
        except RunFailed as error:
            box = [error]
    if distributed:
        dist.broadcast_object_list(box)
    if isinstance(box[0], RunFailed):
        raise box[0]
    return box[0]


START = """\
{model} ({params:,} parameters) on {data} ({n_train:,} + {n_test:,} samples), {device}{backend}, \
torch {torch}, {amp}, {workers} workers
global batch {batch_size} x accum {accum} x world {world} = {global_batch}, \
learning rate {base_lr:g} x {global_batch} / 256 = {lr:g}"""
CLOSING = """\
accuracy {accuracy:.4f}, loss {loss:.4f} on the test set of {data}
{samples_per_s:,.0f} samples/s, waiting {wait:.0%}, {skipped_steps} steps skipped, \
peak memory {memory}, {seconds:.1f} s in all"""


@contextlib.contextmanager
def no_early_success():
    """A data set or model that calls sys.exit() has not trained to the end."""
    try:
        yield
    except SystemExit as error:
        if error.code == TERMINATED:
            raise
        raise RunFailed(f"left early with {error!r}") from None


@no_early_success()
def run(args, data, *, rank=0, world=1, wrap=lambda model: model, backend="", began=None):
    """Trains and evaluates as the flags say; returns the summary, a dict."""
    began = began or time.perf_counter()
    say = functools.partial(print, flush=True) if rank == 0 else lambda *_, **__: None
    state = from_rank_0(functools.partial(load_checkpoint, args, data))
    if args.batch_size == "auto":
        found = state["batch_size"] if state else auto_batch_size(args, data, world)
        args = changed(args, batch_size=found)
    job = Job(args, data, rank, world)
    model = wrap(job.model)
    first = restore(args, state, job)
    summary = summarize(args, data, job, world)
    say(START.format(**{**summary, "amp": summary["amp"] or "float32"}, backend=backend,
                     base_lr=args.lr, n_train=len(data.train), n_test=len(data.test)))
    steps = math.ceil(len(job.loader) / args.accum)

    def live(step, loss, samples_per_s, wait):
        """A line that the next one overwrites, on a terminal alone."""
        if sys.stdout and sys.stdout.isatty():
            say(f"  step {step}/{steps}, loss {loss:.4f}, {samples_per_s:,.0f} samples/s,"
                f" waiting {wait:.0%} ", end="\r")

    results, evaluated = [], None
    for epoch in range(first, args.epochs):
        schedule = begin_epoch(args, job, epoch, rank, steps, summary["lr"])
        r = train_epoch(model, job.loader, classify, job.optimizer, accum=args.accum,
                        amp=job.amp, scheduler=schedule, on_log=live)
        results.append(r)
        evaluated = evaluate(model, job.test_loader, amp=job.amp)
        if not math.isfinite(evaluated[0]):
            raise FloatingPointError(f"the test loss is {evaluated[0]}: try a lower learning rate,"
                                     " and look for bad values in the test set")
        if args.checkpoint:  # DDP: nobody goes on before the file is there
            from_rank_0(functools.partial(save_checkpoint, args, data, job, epoch + 1))
        say(f"epoch {epoch + 1}/{args.epochs}: train loss {r.loss:.4f}, test loss"
            f" {evaluated[0]:.4f}, accuracy {evaluated[1]:.4f}, {r.samples / r.seconds:,.0f}"
            f" samples/s, waiting {r.wait:.0%}, peak memory {_mb(peak_memory_mb(job.device))},"
            f" skipped {r.skipped}")
    if not results:
        say(f"{args.checkpoint} is finished: {first} of {args.epochs} epochs are done")
    return summarize(args, data, job, world, results,
                     evaluated or evaluate(model, job.test_loader, amp=job.amp), began)


def summarize(args, data, job, world, results=(), evaluated=(math.nan, math.nan), began=0.0):
    """The summary; speed and wait are of training alone, over all epochs of this run."""
    global_batch = args.batch_size * args.accum * world
    seconds = sum(r.seconds for r in results) or 1.0  # before training: 0 of everything
    dtype = getattr(job.amp.autocast, "fast_dtype", None)
    return {"device": str(job.device), "torch": torch.__version__, "data": data.name,
            "model": args.model, "params": sum(p.numel() for p in job.bare.parameters()),
            "batch_size": args.batch_size, "accum": args.accum, "world": world,
            "global_batch": global_batch, "lr": scale_lr(args.lr, global_batch),
            "amp": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype),
            "workers": job.loader.num_workers, "epochs": args.epochs,
            "loss": evaluated[0], "accuracy": evaluated[1],
            "samples_per_s": sum(r.samples for r in results) / seconds,
            "wait": sum(r.wait * r.seconds for r in results) / seconds,
            "peak_memory_mb": peak_memory_mb(job.device),
            "skipped_steps": sum(r.skipped for r in results),
            "seconds": time.perf_counter() - began}


def report(args, summary):
    """The closing summary, for people or as JSON."""
    return json.dumps(summary) if args.json else CLOSING.format(
        memory=_mb(summary["peak_memory_mb"]), **summary)


def reset_peak_memory():
    """Starts peak_memory_mb() anew."""
    _libc("malloc_trim", 0)  # what is free but kept would count
    for gpu in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        torch.cuda.reset_peak_memory_stats(gpu)
    with contextlib.suppress(OSError):  # VmHWM; ru_maxrss would never fall, and is inherited
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device):
    """Peak memory in MiB: of the GPUs, else of this process on Linux, else None (not measured)."""
    if device.type == "cuda":
        return round(sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
                     / 2**20, 1)
    try:
        status = Path("/proc/self/status").read_text()
        return round(int(status.split("VmHWM:")[1].split()[0]) / 2**10, 1)
    except (OSError, IndexError):
        return None


def _mb(mb):
    return "not measured" if mb is None else f"{mb:,.0f} MiB"


# ---- --checkpoint --------------------------------------------------------------------------------

def load_checkpoint(args, data):
    """The contents of --checkpoint, or None when there is nothing yet; BadInput if it is no use."""
    if not args.checkpoint:
        return None
    file, temporary = Path(args.checkpoint), Path(f"{args.checkpoint}.tmp")
    try:  # the place is tried before hours of training, not after
        if file.exists() and not file.is_file():
            raise OSError("it is no regular file")
        temporary.touch()  # or left by a run that was killed
        temporary.unlink()
    except OSError as error:
        raise BadInput(f"--checkpoint {file} cannot be written: {error.strerror or error}")
    if not file.exists():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if zipfile.ZipFile(file).testzip():
                raise ValueError("a checksum is wrong")  # which torch.load does not look at
            state = torch.load(file, map_location="cpu", weights_only=True)
            before = [state["ptspeed"][flag] for flag in _flags(args, data)]
        if not (type(state["epoch"]) is type(state["batch_size"]) is int and state["epoch"] >= 0):
            raise ValueError("no whole number of epochs")
    except Exception as error:
        raise BadInput(f"--checkpoint {file} is damaged or not ptspeed's ({type(error).__name__}):"
                       " move it away, or name another file") from None
    for (flag, now), then in zip(_flags(args, data).items(), before):
        if now != then:
            raise BadInput(f"--{flag} is {now}, but --checkpoint {file} was written with {then}")
    return state


def _flags(args, data):
    """What must be the same when a run goes on."""
    return {"model": args.model, "data": data.name, "classes": data.classes}


def restore(args, state, job):
    """Puts a checkpoint's contents into the job; returns the number of finished epochs."""
    if state is None:
        return 0
    try:
        job.bare.load_state_dict(state["model"])
        groups = job.optimizer.state_dict()["param_groups"]  # rates are recomputed, not loaded
        job.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        if state["scaler"]:
            job.amp.scaler.load_state_dict(state["scaler"])
    except Exception as error:
        raise BadInput(f"--checkpoint {args.checkpoint} holds another model:"
                       f" {_one_line(error)}") from None
    return state["epoch"]


def save_checkpoint(args, data, job, epoch):
    """Replaces --checkpoint in one step, so that there is a whole file at any moment."""
    buffer, temporary = io.BytesIO(), f"{args.checkpoint}.tmp"
    torch.save({"ptspeed": _flags(args, data), "epoch": epoch, "batch_size": args.batch_size,
                "model": job.bare.state_dict(), "optimizer": job.optimizer.state_dict()["state"],
                "scaler": job.amp.scaler.state_dict()}, buffer)
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, args.checkpoint)
    except OSError as error:
        raise RunFailed(f"--checkpoint {args.checkpoint} cannot be saved: {error.strerror}; the"
                        " previous one is untouched") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


# ---- --compare: which of these pays here? --------------------------------------------------------

class PerSample(Dataset):
    """The stock idiom for data in memory: one sample at a time, images through PIL."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        from torchvision.transforms import functional as transform
        x, y = self.dataset[index]
        if x.dtype == torch.uint8 and (x.dim() == 2 or x.dim() == 3 and len(x) in (1, 3)):
            image = transform.to_tensor(transform.to_pil_image(x))
            x = transform.normalize(image, *DIGITS).reshape(x.shape)
        return x, int(y)


class Trial:
    """A variant of the job, which is nothing but its flags, under the stopwatch."""

    def __init__(self, args, data):
        if args.batch_size == "auto":
            args = changed(args, batch_size=auto_batch_size(args, data))
        # lr 0 takes as long, and cannot diverge for want of a warm-up
        self.args, self.job = args, Job(changed(args, lr=0.0), data)
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.job.loader))
        self.workers, began = self.job.loader.num_workers, time.perf_counter()
        self.turn(0)
        self.first_s = time.perf_counter() - began  # with --compile: mostly the compiler's

    def loss_fn(self, model, batch):
        """The job's loss; the naive loop keeps its graph and reads it in every step."""
        loss = classify(model, batch)
        if not self.args.detached:
            self.total = self.total + loss
            self.total.item()
        return loss

    def turn(self, seconds):
        """Trains for about that time; returns samples per second, loading included."""
        if self.workers:  # untimed: what they fetched while others had their turn, and a step
            self.drain()
            self.train(itertools.islice(self.batches, 1))
        result = self.train(self.some(seconds))
        return result.samples / result.seconds

    def drain(self):
        """Drops the batches that workers hold ready."""
        for _ in itertools.islice(self.batches, 2 * self.workers):
            pass

    def some(self, seconds):
        """Batches for about that time: whole windows, and one of each worker, as these deliver."""
        end, accum = time.perf_counter() + seconds, self.args.accum
        n = accum * math.ceil(max(1, self.workers) / accum)
        yield from itertools.islice(self.batches, n)
        while time.perf_counter() < end:
            yield from itertools.islice(self.batches, n)

    def train(self, batches):
        """train_epoch on these batches."""
        self.total = 0.0
        if not self.args.uint8:  # as most code does: four bytes cross where one would do
            batches = ((x.float().div_(255) if x.dtype == torch.uint8 else x, y)
                       for x, y in batches)
        return train_epoch(self.job.model, batches, self.loss_fn, self.job.optimizer,
                           accum=self.args.accum, amp=self.job.amp, log_every=10**9)

    def memory_mb(self):
        """Peak memory of one window in MiB."""
        reset_peak_memory()
        self.turn(0)
        return peak_memory_mb(self.job.device)


def flag_words(args, *left_out):
    """The flags that differ from their defaults, as the words of a command line."""
    words = []
    for flag, default in vars(make_parser().parse_args([])).items():
        value = getattr(args, flag)
        if value != default and flag not in (*SWITCHES, *left_out):
            word = flag.replace("_", "-")
            words += ([f"--no-{word}"] if value is False else
                      [f"--{word}"] + [str(value)] * (value is not True))
    return words


def ddp_run(args, data):
    """One run of ptspeed_ddp.py at the same global batch, with the interface of a Trial."""
    flags = changed(args, batch_size=max(1, args.batch_size // args.world), epochs=1, json=True,
                    workers=args.workers // args.world, data=data.name, checkpoint=None,
                    device="cpu" if args.device == "cpu" else None)
    # so that subprocess.run() ends its child
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        done = subprocess.run([sys.executable, Path(__file__).with_name("ptspeed_ddp.py"),
                               "--world", str(args.world), *flag_words(flags, "parallel")],
                              capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise RunFailed("an epoch takes over 60 s")
    finally:
        signal.signal(signal.SIGTERM, before)
    if done.returncode:
        raise RunFailed((done.stderr.strip() or "it failed").splitlines()[-1])
    speed = json.loads(done.stdout.splitlines()[-1])["samples_per_s"]
    return argparse.Namespace(args=args, turn=lambda seconds: speed, memory_mb=lambda: None)


def judge(ratios):
    """(median, spread, verdict) of a variant's speed over the kept one's, measured in turns.

    The spread is the distance of the quartiles; a gain must be over 3 % and beyond it.
    """
    low, median, high = statistics.quantiles(ratios, n=4)
    verdict = f"pays {median:.2f}x" if median > 1 else f"costs {100 * (1 - median):.0f} %"
    if abs(median - 1) <= max(0.03, high - low):
        verdict = "within noise"
    return median, high - low, verdict


ROW = "{:<2}{:<34} {:>10}{:>12}{:>7}  {:<12} {}"
PAYS, UNLESS_IT_COSTS, ALWAYS = ("pays",), ("pays", "within"), ("pays", "within", "costs")


class Comparison:
    """The kept set of techniques, and a row for each one tried."""

    def __init__(self, args, data, seconds=0.4, turns=7):
        self.data, self.json, self.seconds, self.turns = data, args.json, seconds, turns
        naive = {**dict.fromkeys((*SWITCHES, "channels_last", "fused", "compile"), False),
                 "whole_batches": not in_memory(data.train)}
        self.kept = self.naive = Trial(changed(args, batch_size=32, accum=1, amp=None, workers=0,
                                               parallel="none", **naive), data)
        self.naive_speed = statistics.median([self.kept.turn(seconds) for _ in range(turns)])
        self.rows, self.untried = [], {"channels_last", "fused"}  # on, unless found to cost
        if not self.json:
            print(ROW.format("#", "technique", "samples/s", "ratio", "MiB", "speed", "").rstrip())
        self.row("0", "the naive loop", "", self.naive_speed, memory=self.kept.memory_mb())

    def attempt(self, number, name, *, missing=None, make=Trial, keep=PAYS, against=None, **flags):
        """Measures the kept set with other flags against the kept set.

        keep: the verdicts at which they are kept, which follow from what the command can say.
        """
        kept = against or self.kept
        if missing:
            return self.row(number, name, f"not here: {missing}")
        try:
            trial = make(changed(self.kept.args, **flags), self.data)
            pairs, began = [], time.perf_counter()  # a row may take half a minute
            while len(pairs) < (self.turns if time.perf_counter() - began < 30 else 3):
                pairs.append((trial.turn(self.seconds), kept.turn(self.seconds)))
            memory = trial.memory_mb()
        except Exception as error:
            self.untried -= flags.keys()
            why = str(error) if isinstance(error, RunFailed) else _one_line(error)
            name = name.format(changed(kept.args, **flags))
            return self.row(number, name, f"not here: {why}")
        self.untried -= flags.keys()
        ratio, spread, verdict = judge([speed / kept_speed for speed, kept_speed in pairs])
        if "accum" in flags and memory:  # judged by what it is for
            verdict = judge([kept.memory_mb() / memory] * 2)[2] + " (memory)"
        if "compile" in flags:
            name += f", {trial.first_s:.0f} s to compile"
        speed = statistics.median(speed for speed, _ in pairs)
        self.row(number, name.format(trial.args), verdict, speed, ratio, spread, memory, len(pairs))
        if verdict.startswith(keep):
            self.kept = trial
        return self.kept is trial

    def row(self, number, name, verdict, speed=None, ratio=None, spread=None, memory=None,
            turns=None):
        """Keeps a row for --json, or else prints it."""
        self.rows.append({"technique": number, "name": name, "verdict": verdict,
                          "samples_per_s": speed, "ratio": ratio, "spread": spread,
                          "peak_memory_mb": memory, "turns": turns})
        if self.json:
            return
        colour = {"pays": "\033[32m{}\033[0m", "cost": "\033[31m{}\033[0m"}.get(verdict[:4], "{}")
        line = ROW.format(number, name, "" if speed is None else f"{speed:,.0f}",
                          "" if ratio is None else f"{ratio:.2f} ±{spread:.2f}",
                          "" if memory is None else f"{memory:,.0f}",
                          "#" * min(12, round(2 * (speed or 0) / self.naive_speed)),
                          colour.format(verdict) if sys.stdout.isatty() else verdict)
        print(line.rstrip(), flush=True)

    def techniques(self):
        """The rows, in the order of the nine and what came after them."""
        args, train = self.kept.args, self.data.train
        gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
        self.attempt("1", "whole-batch loading", whole_batches=True, keep=ALWAYS,
                     missing=None if in_memory(train) else "the data come one sample at a time")
        workers, most = 1, 4 * usable_cpus()  # those that wait for a disk need no CPU
        while (self.attempt("2", f"workers: {workers}", workers=workers) or workers == 1
               ) and workers < most:  # after 1 in any case: it only moves the work, 2 share it
            workers *= 2
        self.attempt("3", "batch size {0.batch_size}", batch_size="auto")
        quarter = max(1, self.kept.args.batch_size // 4)
        self.attempt("4", f"accumulation: 4 x {quarter}", batch_size=quarter, accum=4, keep=())
        self.attempt("5", "loss detached, not read each step", detached=True, keep=ALWAYS)
        self.attempt("6", "uint8 to the device", uint8=True, keep=ALWAYS)
        self.attempt("6", "channels_last", channels_last=True, keep=UNLESS_IT_COSTS)
        self.attempt("7", "mixed precision", amp="auto")
        needs_2 = None if gpus > 1 else "needs 2 GPUs"
        self.attempt("8", "DataParallel", parallel="dp", missing=needs_2)
        self.attempt("8", "model split over devices", parallel="split", missing=needs_2)
        world = gpus or 2
        self.attempt("9", f"DDP, {world} processes, one run", make=ddp_run, world=world, keep=(),
                     missing=needs_2 if gpus == 1 else None)
        self.attempt("+", "fused optimizer", fused=True, keep=UNLESS_IT_COSTS)
        compiler = os.environ.get("CXX", "cl" if os.name == "nt" else "c++")
        self.attempt("+", "compile", compile=True,
                     missing=None if shutil.which(compiler) else "needs a C++ compiler")
        self.attempt("=", "all that was kept, against naive", against=self.naive, keep=())


def bottleneck(args, data, seconds=1.2):
    """Times the loader alone, the step alone on one resident batch, and both."""
    trial = Trial(args, data)
    both = trial.turn(seconds)
    trial.drain()
    began = time.perf_counter()
    loader = sum(len(y) for _, y in trial.some(seconds)) / (time.perf_counter() - began)
    batch = to_gpu(next(trial.batches), trial.job.device)
    trial.batches, trial.workers = itertools.repeat(batch), 0
    step = trial.turn(seconds)
    slower = "loading" if loader < step else "computing"
    return (f"the loader alone {loader:,.0f} samples/s, the step alone {step:,.0f}, both"
            f" {both:,.0f}: {slower} is the bottleneck")


@no_early_success()
def compare(args, data):
    """Switches the techniques on one after the other, keeps what pays, ends with the command."""
    args = changed(args, batch_size=64 if args.batch_size == "auto" else args.batch_size)
    began, times = time.perf_counter(), bottleneck(args, data)
    if not args.json:
        print(times, flush=True)
    table = Comparison(args, data)
    try:
        table.techniques()
    finally:  # also after Ctrl-C, for the rows that are done
        took, n = time.perf_counter() - began, table.turns
        least = min(row["turns"] or n for row in table.rows)
        conditions = (f"measured on {pick_device(args.device)}, {usable_cpus()} cores, torch"
                      f" {torch.__version__}, model {args.model}, data {data.name}, n ="
                      f" {n if least == n else f'{least} to {n}'} turns of {table.seconds} s,"
                      f" {took:.0f} s in all")
        kept = changed(table.kept.args, **dict.fromkeys(table.untried, True))
        command = shlex.join(["python", "ptspeed.py", *flag_words(
            kept, "root", "epochs", "checkpoint", "json")])
        print(json.dumps({"times": times, "rows": table.rows, "command": command,
                          "conditions": conditions}) if args.json else f"{command}\n{conditions}")


def main(argv=None):
    """Runs the job; exits 2 on bad input, 1 when the run fails, 130 on Ctrl-C."""
    began = time.perf_counter()
    reset_peak_memory()
    with told_in_one_line("ptspeed.py"):
        p = make_parser()
        p.add_argument("--parallel", choices=("none", "dp", "split"), help="several GPUs in this"
                       " process: DataParallel, or the model split over them")
        p.add_argument("--compare", action="store_true", help="measure which technique pays on"
                       " this machine, from the naive loop on")
        args = p.parse_args(argv)
        data = load_data(args)
        if args.compare and args.checkpoint:
            raise BadInput("--compare trains nothing to the end: leave --checkpoint out")
        if args.compare:
            compare(args, data)
        else:
            print(report(args, run(args, data, began=began)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
