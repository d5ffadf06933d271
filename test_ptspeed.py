# SPDX-License-Identifier: MIT
"""The proofs of ptspeed: a test's name is the claim, the comment on its line is its case's id."""
import collections
import contextlib
import copy
import dataclasses
import datetime
import errno
import functools
import gc
import io
import itertools
import json
import math
import os
import pickle
import platform
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import (BatchSampler, DataLoader, IterableDataset, Subset, TensorDataset,
                              default_collate, get_worker_info)

import ptspeed
import ptspeed_ddp
from ptspeed import (Amp, Shuffle, accumulate_step, amp_step, evaluate, find_batch_size,
                     make_loader, mixed_precision, scale_lr, split_model, to_gpu, train_epoch,
                     usable_cpus, wrap_dataparallel)

# ==================================================================================================
# Part I: the techniques
# ==================================================================================================

FP16, BF16, BAD = torch.float16, torch.bfloat16, [math.inf, -math.inf, math.nan]
SGD = functools.partial(torch.optim.SGD, lr=0.1)
each = pytest.mark.parametrize
plain_and_fused = each("make", [functools.partial(kind, lr=0.1, fused=fused, **more)
                                for fused in (False, True) for kind, more in [
                                    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})]],
                       ids=["sgd", "adamw", "fused sgd", "fused adamw"])


@pytest.fixture(autouse=True)
def one_seed_and_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_gpu(monkeypatch):
    """A CUDA build of torch on a machine without a GPU, where some releases raise."""
    def absent():
        raise RuntimeError("there is no accelerator")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", absent)
    for module in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(module, "device_count", lambda: 0)


def mlp(dtype=torch.float64, out=1):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out)).to(dtype)


def one_weight(*values, dtype=torch.float64):
    """A linear model whose mean output has the mean input as its gradient."""
    model = nn.Linear(len(values), 1, bias=False, dtype=dtype)
    model.weight.data[:] = torch.tensor(values)
    return model


def micro_batches(sizes, dtype=torch.float64):
    return [(torch.randn(n, 3, dtype=dtype), torch.randn(n, 1, dtype=dtype)) for n in sizes]


def concatenated(batches):
    return tuple(torch.cat(field) for field in zip(*batches))


def mse(model, batch):
    """A batch may hold a factor that makes its loss inf or nan."""
    return F.mse_loss(model(batch[0]), batch[1]) * (batch[2] if len(batch) > 2 else 1)


def mean_output(model, batch):
    return model(batch[0]).mean()


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def oracle_step(model, batch, loss_fn, optimizer):
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def close(a, b, tolerance=1e-12):
    """Whether two tensors, or the weights of two models, agree."""
    pair = [list(x.parameters()) if isinstance(x, nn.Module) else [x] for x in (a, b)]
    return all(torch.allclose(x, y, rtol=0, atol=tolerance) for x, y in zip(*pair, strict=True))


# ---- 1 DataLoader, 2 num_workers -----------------------------------------------------------------


class Stream(IterableDataset):
    items = range(6)

    def __iter__(self):
        return iter(self.items)


def shard(worker):
    info = get_worker_info()
    info.dataset.items = info.dataset.items[worker::info.num_workers]


class Squares:
    """A map-style dataset that is not in memory."""
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.full((2,), float(range(10)[i])), i * i


class Added(TensorDataset):
    """A whole batch is another one than its samples."""
    def __getitems__(self, indices):
        return [(x + 1, *rest) for x, *rest in map(self.__getitem__, indices)]


class NoLength:
    """A sampler without len(), as torch allows."""
    def __iter__(self):
        return iter([3, 1, 2])


ROWS = TensorDataset(torch.arange(20.).view(10, 2), torch.arange(10))


@each("option", [{"prefetch_factor": 2}, {"persistent_workers": True}, {"timeout": 5},
                 {"multiprocessing_context": "spawn"}])
def test_options_that_need_workers_are_left_out_without_workers(option):  # L1
    assert len(list(make_loader(ROWS, 8, num_workers=0, **option))) == 2


@each("workers, option", [(None, {}), (0, {}), (1, {}), (2, {}), (2, {"worker_init_fn": shard})])
def test_a_stream_yields_each_item_once_and_warns_once_if_it_drops_workers(workers, option):  # L2
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loader = make_loader(Stream(), 4, num_workers=workers, **option)
        assert sorted(torch.cat(list(loader)).tolist()) == [0, 1, 2, 3, 4, 5]
    dropped = workers == 2 and not option
    assert [w.category for w in seen] == [UserWarning] * dropped
    assert workers is None or loader.num_workers == workers - dropped


@each("dataset, option, match", [
    (Stream(), {"shuffle": True}, "shuffle"), (ROWS, {"sampler": [1], "shuffle": True}, "shuffle"),
    (ROWS, {"batch_sampler": [[0]], "shuffle": True}, "shuffle"),
    (ROWS, {"batch_sampler": [[0]], "sampler": [1]}, "sampler"),
    *[(dataset, {"drop_last": True, **option}, r"\b5\b.*\b8\b") for dataset, option in [
        ([1, 2, 3, 4, 5], {}), (Subset(ROWS, range(5)), {"shuffle": True}),
        (TensorDataset(torch.ones(5)), {}), (ROWS, {"sampler": range(5)})]]])
def test_options_that_contradict_or_leave_no_batch_are_an_error(dataset, option, match):  # L2 L3
    with pytest.raises(ValueError, match=match):
        make_loader(dataset, 8, **option)


@each("dataset, option", [
    (ROWS, {}), (Squares(), {}), (Subset(ROWS, [3, 1, 2]), {}), (ROWS, {"drop_last": True}),
    (Subset(Subset(ROWS, range(2, 9)), [3, 1]), {}), (ROWS, {"sampler": range(1, 10, 4)}),
    (Subset(ROWS, torch.tensor([1, 0, 5, 1])), {}), (ROWS, {"sampler": torch.tensor([1, 0, 5])}),
    (ROWS, {"sampler": NoLength(), "drop_last": True}), (ROWS, {"collate_fn": default_collate}),
    (ROWS, {"sampler": BatchSampler(range(5), 2, False), "batch_size": None}),
    (ROWS, {"batch_sampler": [[0, 1], [4]], "batch_size": 1}), (Added(*ROWS.tensors), {}),
    (ROWS, {"sampler": torch.tensor([4, 1, 0, 0], dtype=torch.uint8).numpy()}),
    (Subset(ROWS, torch.tensor([4, 1, 0], dtype=torch.int16)), {})])
def test_the_batches_are_those_of_a_plain_dataloader_and_nothing_warns(dataset, option):
    option = {"batch_size": 2, **option}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_loader(dataset, num_workers=512, **option)
        batches = list(make_loader(dataset, num_workers=0, **option))
    for ours, plain in zip(batches, DataLoader(dataset, **option), strict=True):
        assert all(map(torch.equal, ours, plain))


@each("option, fetches", [({}, 3), ({"collate_fn": default_collate}, 10)])
def test_tensors_in_memory_are_indexed_once_per_batch(option, fetches, monkeypatch):
    calls, fetch = [], TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__",
                        lambda self, i: calls.append(i) or fetch(self, i))
    assert len(list(make_loader(ROWS, 4, **option))) == 3 and len(calls) == fetches


def test_by_default_tensors_get_no_worker_and_others_this_ranks_cpus(monkeypatch):
    monkeypatch.setattr(ptspeed, "usable_cpus", lambda ranks: 12 // ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    kinds = ROWS, Subset(ROWS, range(3)), Squares(), Stream()
    assert [make_loader(kind, 2).num_workers for kind in kinds] == [0, 0, 3, 1]


@each("dataset", [ROWS, Squares()])
@each("batch_size", [3, None])
def test_the_order_is_one_for_any_number_of_workers_and_new_in_each_epoch(dataset, batch_size):
    def orders(workers, seed=0, start=0, **option):
        loader = make_loader(dataset, batch_size, shuffle=True, num_workers=workers, seed=seed,
                             **option)
        loader.sampler.set_epoch(start)
        return [torch.cat([torch.as_tensor(batch[1]).view(-1) for batch in loader]).tolist()
                for _ in range(start, 3)]

    alone = orders(0)
    assert len(set(map(tuple, alone))) == 3 and orders(0) == alone != orders(0, seed=1)
    assert all(len(set(order)) == 10 for order in alone) and orders(0, start=2) == alone[2:]
    assert orders(1) == orders(2) == orders(2, persistent_workers=True) == alone


def test_spawned_workers_can_load_what_is_ours():  # L6
    option = {"num_workers": 2, "multiprocessing_context": "spawn"}
    spawned, plain = (list(make_loader(ROWS, 4, shuffle=True, **o)) for o in (option, {}))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(spawned, plain, strict=True))


@each("n, world", [(5000, 1024), (10, 3), (9, 3), (5, 1024), (7, 1)])
def test_training_shards_are_disjoint_and_equal_cuts_of_the_common_order(n, world):
    order = list(Shuffle(range(n), seed=3))
    shards = [list(Shuffle(range(n), world, rank, seed=3)) for rank in range(world)]
    assert sorted(order) == list(range(n)) != order
    assert shards == [order[:n - n % world][rank::world] for rank in range(world)]


@each("n, world", [(10, 3), (2, 4), (1, 1)])
def test_evaluation_shards_are_complete_and_never_padded(n, world):
    data = TensorDataset(torch.arange(n))
    shards = [make_loader(data, 2, sampler=range(rank, n, world)) for rank in range(world)]
    assert sorted(i for shard in shards for (x,) in shard for i in x.tolist()) == list(range(n))


@each("groups, quotas, ranks, cpus", [
    ("0::/", {}, 1, 64), ("0::/", {}, 2, 32), ("0::/", {}, 1000, 1), ("0::/", {"": 150000}, 1, 1),
    ("0::/", {"": 50000}, 2, 1), ("0::/", {"": 800000}, 2, 4), ("0::/", {"": "max"}, 1, 64),
    ("0::/", {"": 9900000}, 1, 64), ("0::/a/b", {"a/b": "max", "a": 300000}, 1, 3),
    ("0::/a/b", {"a/b": 200000, "a": "max"}, 1, 2), ("0::/a", {"a": 900000, "b": 100000}, 1, 9),
    ("0::/../../host/pod", {"": 400000}, 1, 4), ("4:cpu:/", {"cpu": -1}, 1, 64),
    ("4:cpu,cpuacct:/d/x", {"cpu,cpuacct/d": 500000, "cpu,cpuacct/d/x": -1}, 1, 5),
    ("4:cpuset:/d\n2:cpu:/", {"cpuset/d": 100000}, 1, 64),
    ("4:cpuacct,cpu:/d", {"cpu/d": 300000}, 1, 3), ("4:cpu:/host", {"cpu": 250000}, 1, 2),
    ("4:cpu:/d\n0::/s", {"cpu/d": 600000, "unified/s": "max"}, 1, 6),
    ("1:name=systemd:/d\n0::/s", {"unified/s": 700000}, 1, 7), ("0::/", {"": "a"}, 1, 64),
    ("0::/", {"": "1 0"}, 1, 64), ("0::/", {"": 0}, 1, 64)])
def test_usable_cpus_counts_affinity_quotas_parents_and_ranks(groups, quotas, ranks, cpus,
                                                              tmp_path, monkeypatch):  # L5
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    files = {"proc/self/cgroup": groups + "\n"}
    for folder, quota in quotas.items():
        v1 = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100000}
        for name, text in (v1 if "cpu" in folder else {"cpu.max": f"{quota} 100000"}).items():
            files[f"sys/fs/cgroup/{folder}/{name}"] = f"{text}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cpus(ranks, root=str(tmp_path)) == cpus


# ---- 3 batch size and learning rate --------------------------------------------------------------


class Machine:
    """A step that runs out of memory above `room` samples, and gets no faster above `fast`."""
    def __init__(self, monkeypatch, room=10**6, fast=10**6, error=MemoryError, text=""):
        self.room, self.fast, self.error, self.text = room, fast, error, text
        self.sizes, self.failed, collect = [], lambda: None, gc.collect
        monkeypatch.setattr(ptspeed, "measure", self.measure)
        monkeypatch.setattr(gc, "collect", lambda: self.recovered() and collect())

    def recovered(self):
        assert self.failed() is None and sys.exc_info()[0] is None, "still inside the handler"
        return True

    def __call__(self, n):
        assert self.recovered() and len(self.sizes) < 50, "endless"
        tensors = {n}
        self.failed = weakref.ref(tensors)
        self.sizes.append(n)
        if n > self.room:
            raise self.error(self.text)

    def measure(self, step, *, seconds):
        step()
        return min(self.sizes[-1], self.fast) / self.sizes[-1]


@each("error, text", [(torch.OutOfMemoryError, "CUDA out of memory."), (MemoryError, ""),
                      (RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
                      (RuntimeError, "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
                      (OSError, "[Errno 12] Cannot allocate memory"),
                      (RuntimeError, "std::bad_alloc")])
@each("start, right", [(1, 32), (37, 37), (48, 24), (64, 32), (256, 32)])
def test_out_of_memory_above_37_gives_the_size_before(error, text, start, right, monkeypatch):  # B2
    assert find_batch_size(Machine(monkeypatch, 37, error=error, text=text), start=start) == right


@each("start", [1, 16])
@each("error, text, match", [(MemoryError, "", "batch of 1"), (RuntimeError, "no", "no"),
                             (ValueError, "out of memory", "out"), (KeyError, "x", "x")])
def test_not_one_sample_fits_and_any_other_error_passes(start, error, text, match,
                                                        monkeypatch):  # B2
    with pytest.raises(error, match=match):
        find_batch_size(Machine(monkeypatch, 0, error=error, text=text), start=start)


@each("start, limit, fast, right, largest", [
    (1, 100, 999, 100, 100), (1, 64, 64, 64, 64), (3, 3, 99, 3, 3), (5, 12, 99, 12, 12),
    (1, 64, 16, 16, 32), (1, 8192, 1, 1, 2)])
def test_the_size_is_where_throughput_stops_rising_or_the_limit(start, limit, fast, right, largest,
                                                                monkeypatch):  # B2
    step = Machine(monkeypatch, fast=fast)
    assert find_batch_size(step, start=start, limit=limit) == right
    assert max(step.sizes) == largest


@each("after", range(9))
def test_a_machine_that_becomes_busy_does_not_hide_the_gain_of_a_larger_batch(after, monkeypatch):
    step, calls = Machine(monkeypatch, fast=64), itertools.count()
    monkeypatch.setattr(ptspeed, "measure", lambda *args, **kwargs: step.measure(
        *args, **kwargs) * (1 if next(calls) < after else 0.5))
    assert find_batch_size(step) == 64


@each("accum, world, adaptive, right", [(4, 8, False, 0.8), (4, 8, True, 0.1 * math.sqrt(8)),
                                        (4, 1, False, 0.1), (4, 1, True, 0.1)])
def test_the_rate_follows_the_global_batch(accum, world, adaptive, right):  # B1
    assert scale_lr(0.1, 64 * accum * world, adaptive=adaptive) == right


@each("batches, right", [([(8, 1), (1, 8)], 16 / 9),
                         ([(4, 1), (4, 2), (3, 3), (4, 4), (1, 5), (2, 6)], 3)], ids=str)
@each("accum", [1, 2, 4])
def test_the_loss_of_an_epoch_is_the_mean_over_all_samples(batches, right, accum):  # B3 G5
    logged, model = [], one_weight(1.0)
    batches = [(torch.full((n, 1), mean).double(),) for n, mean in batches]
    result = train_epoch(model, batches, mean_output, SGD(model.parameters(), lr=0), accum=accum,
                         on_log=lambda step, loss, speed, wait: logged.append(loss))
    assert [result.loss] == logged == pytest.approx([right], rel=1e-6)
    assert result.samples == sum(len(x) for x, in batches)


# ---- 4 gradient accumulation, 5 keep no graph ----------------------------------------------------


@plain_and_fused
@each("sizes", [[4, 4, 2], [4, 1], [7], [1, 1, 1, 5]], ids=str)
def test_a_window_of_any_sizes_equals_the_step_on_its_concatenated_batches(sizes, make):  # point 1
    model, batches = mlp(), micro_batches(sizes)
    oracle = copy.deepcopy(model)
    optimizer, textbook = make(model.parameters()), make(oracle.parameters())
    for _ in range(3):
        result = accumulate_step(model, iter(batches), mse, optimizer)
        loss = oracle_step(oracle, concatenated(batches), mse, textbook)
        assert result.loss.item() == pytest.approx(loss, rel=1e-6)
    assert close(model, oracle) and result[1:] == (sum(sizes), True, None)


def test_the_gradient_is_the_mean_over_targets_and_not_the_mean_of_means():  # G1
    model = one_weight(0.0)
    batches = [(torch.full((n, 1), gradient).double(),) for n, gradient in [(4, 1.0), (1, 9.0)]]
    accumulate_step(model, batches, mean_output, SGD(model.parameters(), lr=1))
    assert model.weight.item() == pytest.approx(-2.6, abs=1e-12)


def valid_labels(batch):
    return (batch[1] != -100).sum()


@each("valid", [*itertools.permutations([5, 1, 0]), (0, 0), ()], ids=str)
def test_micro_batches_weigh_their_valid_targets_and_one_without_is_harmless(valid):  # point 2
    labels = [torch.where(torch.arange(5) < n, torch.randint(3, (5,)), -100) for n in valid]
    batches = [(torch.randn(5, 3).double(), y) for y in labels]
    model = mlp(out=3)
    oracle = copy.deepcopy(model)
    run = functools.partial(accumulate_step, model, batches, cross_entropy,
                            SGD(model.parameters()), count=valid_labels)
    if not sum(valid):
        with pytest.raises(ValueError, match="target"):
            run()
    else:
        loss = oracle_step(oracle, concatenated(batches), cross_entropy, SGD(oracle.parameters()))
        assert run()[:2] == (pytest.approx(loss, rel=1e-6), 6)
    assert close(model, oracle)


@each("accum, sizes", [(4, [3] * 6), (2, [3] * 5), (3, [4, 4, 2, 1])], ids=str)
def test_a_short_last_window_equals_the_step_on_its_concatenated_batches(accum, sizes):  # G2-G4
    model, batches = mlp().eval(), micro_batches(sizes)
    oracle = copy.deepcopy(model)
    optimizer, textbook = SGD(model.parameters()), SGD(oracle.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1)
    for _ in range(2):  # the second epoch would show what the first one left behind
        result = train_epoch(model, iter(batches), mse, optimizer, accum=accum, scheduler=scheduler)
        for i in range(0, len(sizes), accum):
            oracle_step(oracle, concatenated(batches[i:i + accum]), mse, textbook)
    assert close(model, oracle) and all(p.grad is None for p in model.parameters())
    assert (result.steps, result.samples) == (scheduler.last_epoch / 2, sum(sizes))
    assert result.steps == math.ceil(len(sizes) / accum) and model.training


class Restarts:
    """An iterator that begins anew when it is asked once more after its end."""
    def __init__(self, batches):
        self.batches, self.rest, self.ends = batches, iter(batches), 0

    def __iter__(self):
        return self

    def __next__(self):
        for batch in self.rest:
            return batch
        self.rest, self.ends = iter(self.batches), self.ends + 1
        assert self.ends < 3, "endless"
        raise StopIteration


@each("n", range(1, 6))
@each("accum", [1, 2, 3])
def test_an_iterator_that_would_start_anew_is_one_epoch(n, accum):  # G3
    model, loader = mlp(), Restarts(micro_batches([2] * n))
    for _ in range(2):
        result = train_epoch(model, loader, mse, SGD(model.parameters()), accum=accum)
        assert (result.samples, result.steps) == (2 * n, math.ceil(n / accum))


@each("fused", [False, True])
def test_gradients_of_other_backward_passes_have_no_part_in_a_step(fused):  # G2
    model, batches = mlp(), micro_batches([4, 4])
    oracle = copy.deepcopy(model)
    mse(model, batches[0]).backward()
    accumulate_step(model, batches, mse, SGD(model.parameters(), fused=fused))
    oracle_step(oracle, concatenated(batches), mse, SGD(oracle.parameters()))
    assert close(model, oracle)


@each("option, loss_fn, match", [
    ({"count": lambda batch: 0.5}, mse, "count"), ({"count": lambda batch: -4}, mse, "count"),
    ({"count": lambda batch: math.nan}, mse, "count"), ({"max_norm": -1}, mse, "max_norm"),
    ({"max_norm": math.nan}, mse, "max_norm"), ({"max_norm": 0}, mse, "max_norm"),
    ({}, lambda model, batch: model(batch[0]), "one mean")])
def test_what_would_train_wrongly_is_an_error_and_moves_nothing(option, loss_fn, match):
    model = mlp()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=match):
        amp_step(model, micro_batches([4])[0], loss_fn, SGD(model.parameters()), **option)
    assert close(model, before)


def test_a_loss_with_one_element_is_a_number():  # what DataParallel gathers from one GPU
    model = mlp()
    result = train_epoch(model, micro_batches([4, 4]), lambda *args: mse(*args)[None],
                         SGD(model.parameters()), log_every=1)
    assert math.isfinite(result.loss)


def test_a_step_that_failed_leaves_no_gradient_to_the_next():  # G2
    model, batches = mlp(), micro_batches([4, 4])
    oracle, optimizer = copy.deepcopy(model), SGD(model.parameters())
    with pytest.raises(IndexError):  # the second one has no targets to compare with
        accumulate_step(model, [batches[0], batches[1][:1]], mse, optimizer)
    accumulate_step(model, batches, mse, optimizer)
    oracle_step(oracle, concatenated(batches), mse, SGD(oracle.parameters()))
    assert close(model, oracle)


@each("dtype, precision", [(torch.float32, None), (torch.float64, None), (torch.float32, BF16)])
@each("max_norm", [None, 1.0])
def test_what_a_step_returns_holds_no_graph(dtype, precision, max_norm):  # G6
    model = mlp(dtype)
    result = accumulate_step(model, micro_batches([3, 2], dtype), mse, SGD(model.parameters()),
                             mixed_precision("cpu", precision), max_norm=max_norm)
    assert (result.loss.dtype, result.loss.dim(), result.stepped) == (torch.float32, 0, True)
    assert not any(getattr(x, "requires_grad", False) for x in result)


def test_memory_stays_flat_over_1000_steps():  # G6
    alive, model = [], mlp()
    train_epoch(model, (micro_batches([1])[0] for _ in range(1000)), mse, SGD(model.parameters()),
                log_every=200, on_log=lambda *log: alive.append(
                    sum(type(x) is torch.Tensor for x in gc.get_objects())))
    assert len(alive) == 5 and max(alive) <= alive[0] + 5


class HostReads(TorchFunctionMode):
    """Counts what would wait for a device."""
    n, names = 0, {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__",
                   "__index__", "__format__"}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


@each("precision", [None, BF16])
def test_a_loop_reads_the_device_at_most_once_per_log(precision):  # G6
    model, steps, batches = mlp(torch.float32), [], micro_batches([2] * 14, torch.float32)
    with HostReads() as reads:
        train_epoch(model, batches, mse, SGD(model.parameters()), accum=2, log_every=3,
                    amp=mixed_precision("cpu", precision), on_log=lambda *log: steps.append(log[0]))
        assert steps == [3, 6, 7] and 1 <= reads.n <= 3


@each("loader", [[], iter(()), make_loader(TensorDataset(torch.ones(0)), 4)])
def test_an_empty_loader_is_an_error(loader):
    model = mlp()
    with pytest.raises(ValueError, match="no batch"):
        train_epoch(model, loader, mse, SGD(model.parameters()))
    with pytest.raises(ValueError, match="no sample"):
        evaluate(model, loader)


def learn(precision, accum=1, seed=0, epochs=20):
    torch.manual_seed(0)
    x, model, amp = torch.randn(256, 3), mlp(torch.float32, 2), mixed_precision("cpu", precision)
    data = TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())
    loader, optimizer = make_loader(data, 10, shuffle=True, seed=seed), SGD(model.parameters())
    for _ in range(epochs):
        train_epoch(model, loader, cross_entropy, optimizer, accum=accum, amp=amp, max_norm=5.0)
    return model, evaluate(model, make_loader(data, 100), amp=amp)


@each("precision, accum", [(None, 1), (None, 3), ("auto", 1), (FP16, 2)])
def test_it_learns(precision, accum):
    loss, accuracy, n = learn(precision, accum)[1]
    assert learn(precision, epochs=0)[1][1] < 0.8 < 0.95 < accuracy and loss < 0.2 and n == 256


def test_one_seed_gives_the_same_weights_bit_for_bit_and_another_seed_others():
    model, again, other = (learn(None, seed=seed, epochs=1)[0] for seed in (0, 0, 1))
    assert close(model, again, 0) and not close(model, other, 1e-6)


# ---- 6 to the GPU --------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x name")
Frozen = dataclasses.make_dataclass("Frozen", ["x"], frozen=True)
Slots = dataclasses.make_dataclass("Slots", ["x"], slots=True)
FrozenSlots = dataclasses.make_dataclass("FrozenSlots", ["x"], frozen=True, slots=True)


class Output(dict):
    """A dict whose update() is closed, as Hugging Face's ModelOutput has it."""
    def update(self, *args, **kwargs):
        raise TypeError("update() is closed")


class Encoding(collections.UserDict):
    """A mapping that moves itself, as Hugging Face's BatchEncoding does."""
    def to(self, device):
        return Encoding({"x": self["x"].to(device), "by": "to"})


class Attributes(dict):
    """Its keys as attributes: what is absent is a KeyError."""
    __getattr__ = dict.__getitem__


class InPlace:
    """A batch that moves in place."""
    moved = False

    def to(self, device):
        self.moved = True


def test_every_tensor_in_a_nesting_moves_and_the_rest_stays():  # T1
    t, other = torch.ones(2), object()
    batch = {"x": [t, (t, {"y": t})], "name": "a", "none": None, "n": 3, "other": other}
    moved = to_gpu(batch, "meta")
    first, (second, inner) = moved["x"]
    assert all(m.device.type == "meta" for m in (first, second, inner["y"]))
    assert list(moved) == list(batch) and list(moved.values())[1:] == ["a", None, 3, other]
    assert type(moved["x"]) is list and type(moved["x"][1]) is tuple and type(inner) is dict
    assert batch["x"][0] is batch["x"][1][0] is batch["x"][1][1]["y"] is t
    assert to_gpu(t, "cpu:0") is t is to_gpu(batch, torch.device("cpu"))["x"][0]  # no copy


@each("make, get", [
    (lambda t: Pair(t, "a"), lambda o: o.x), (Frozen, lambda o: o.x), (Slots, lambda o: o.x),
    (FrozenSlots, lambda o: o.x), (lambda t: Output(x=t), lambda o: o["x"]),
    (lambda t: collections.OrderedDict(b=t, a=1), lambda o: o["b"]),
    (lambda t: collections.defaultdict(list, x=t), lambda o: o["x"]),
    (lambda t: collections.UserDict(x=t), lambda o: o["x"]),
    (lambda t: collections.UserList([t]), lambda o: o[0]),
    (lambda t: collections.deque([t], maxlen=1), lambda o: o[0]),
    (lambda t: collections.ChainMap({"x": t}), lambda o: o["x"]),
    (lambda t: Attributes(x=t), lambda o: o["x"]),
    (lambda t: nn.utils.rnn.pack_sequence([t]), lambda o: o.data),
    (lambda t: torch.max(t[None], 1), lambda o: o.indices)])
def test_each_kind_of_container_keeps_its_type_and_its_original(make, get):  # T2
    made = make(torch.ones(3))
    moved = to_gpu(made, "meta")
    assert type(moved) is type(made) and get(moved).device.type == "meta"
    assert get(made).device.type == "cpu"
    if isinstance(made, collections.defaultdict):
        assert moved.default_factory is made.default_factory
    assert not isinstance(made, dict) or list(moved) == list(made)


@each("thing", [torch.Size([2, 3]), collections.Counter(a=3), Frozen, nn.Linear, torch.Tensor,
                Encoding, "ab", range(3), {1}, torch.int8])
def test_what_holds_no_tensor_stays_what_it_is(thing):  # T1
    moved = to_gpu([thing], "meta")[0]
    assert type(moved) is type(thing) and moved == thing


def test_whatever_has_a_to_is_asked_first_and_may_move_in_place():
    batch, t = InPlace(), torch.ones(2)
    moved = to_gpu((Encoding(x=t), batch, nn.Linear(1, 1)), "meta")
    assert moved[0]["by"] == "to" and moved[1] is batch and batch.moved
    assert moved[2].weight.device.type == "meta"


@each("batch, right", [
    ((torch.ones(7, 3), 0), 7), ({"x": torch.ones(7), "y": 1}, 7), (torch.ones(7, 2), 7),
    ([torch.ones(7)], 7), (Frozen(torch.ones(7)), 7), (collections.UserDict(x=torch.ones(7)), 7),
    (Pair(torch.ones(7), "a"), 7), (([torch.ones(3, 8, 8)] * 7, torch.ones(7)), None), ({}, None),
    ((torch.tensor(7), 1), None), ((), None), (7, None), ("batch", None), (None, None)])
def test_the_default_count_is_the_length_of_a_tensor_in_front_or_an_error(batch, right):  # T3
    model = one_weight(1.0)
    with contextlib.nullcontext() if right else pytest.raises(ValueError, match="count"):
        result = amp_step(model, batch, lambda m, b: m.weight.sum(), SGD(model.parameters()))
        assert result.count == right


def test_count_is_asked_before_the_batch_moves():
    model, seen = one_weight(1.0), []
    amp_step(model, InPlace(), lambda model, batch: model.weight.sum() * batch.moved,
             SGD(model.parameters()), count=lambda batch: seen.append(batch.moved) or 1)
    assert seen == [False] and model.weight.item() == pytest.approx(0.9)


# ---- 7 mixed precision ---------------------------------------------------------------------------


def batches_with(factors):
    batches = micro_batches([2] * len(factors), torch.float32)
    return [(*batch, factor) for batch, factor in zip(batches, factors)]


def scaled(autocast=None):
    return Amp(autocast or contextlib.nullcontext(), torch.amp.GradScaler("cpu", init_scale=2.**16))


@each("fused", [False, True])
@each("true_norm", [0.5, 5.0])
@each("amp, tolerance", [
    (lambda: None, 1e-6), (lambda: mixed_precision("cpu", BF16), 2e-2), (scaled, 1e-6),
    (lambda: scaled(torch.autocast("cpu", FP16)), 2e-3)], ids=["off", "bf16", "scaler", "fp16"])
def test_the_applied_norm_is_the_smaller_of_max_norm_and_the_true_one(fused, true_norm, amp,
                                                                      tolerance):  # A1, point 4
    model, amp = one_weight(0.0, 0.0, dtype=torch.float32), amp()
    optimizer = SGD(model.parameters(), lr=1, fused=fused)
    x = torch.tensor([[0.6, 0.8]]).repeat(8, 1) * true_norm
    for _ in range(10):
        result = accumulate_step(model, [(x,), (x,)], mean_output, optimizer, amp, max_norm=1.0)
        if result.stepped:  # float16 begins with a scale that is too large, and so skips
            break
    assert result.grad_norm.item() == pytest.approx(true_norm, rel=tolerance)
    assert model.weight.norm().item() == pytest.approx(min(1.0, true_norm), rel=tolerance)


@each("precision", [None, BF16, "scaler"])
@each("x", [*([bad, 1.0] for bad in BAD), [1e25, 1e25]], ids=str)
def test_a_norm_that_is_not_finite_never_reaches_the_weights(precision, x):  # A4, point 4
    model, skips = one_weight(1.0, 1.0, dtype=torch.float32), precision == "scaler"
    amp = scaled() if skips else mixed_precision("cpu", precision)
    optimizer = SGD(model.parameters(), weight_decay=0.5)
    with contextlib.nullcontext() if skips else pytest.raises(FloatingPointError, match="norm"):
        result = amp_step(model, (torch.tensor([x]),), mean_output, optimizer, amp, max_norm=1.0)
        assert result.stepped is False
    assert model.weight.tolist() == [[1.0, 1.0]] and model.weight.grad is None


@plain_and_fused
@each("bad", BAD)
@each("max_norm", [None, 1.0])
def test_a_skipped_step_is_seen_and_moves_nothing(make, bad, max_norm):  # A2, point 5
    model, amp, (good, wrong) = mlp(torch.float32), scaled(), batches_with([1.0, bad])
    optimizer = make(model.parameters())
    assert amp_step(model, good, mse, optimizer, amp, max_norm=max_norm).stepped is True
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    result = accumulate_step(model, [good, wrong], mse, optimizer, amp, max_norm=max_norm)
    after = [model.state_dict(), optimizer.state_dict()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert result.stepped is False and amp.scaler.get_scale() == 2.0**15
    assert all(p.grad is None for p in model.parameters())


@plain_and_fused
def test_after_a_skipped_step_scheduler_and_loss_stand_still(make):  # A2
    model, batches = mlp(torch.float32), batches_with([1.0, math.inf, 1.0])
    optimizer = make(model.parameters(), lr=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    result = train_epoch(model, batches, mse, optimizer, amp=scaled(), scheduler=scheduler)
    assert (result.steps, result.skipped, scheduler.last_epoch) == (3, 1, 2)
    right = sum(mse(model, batch).item() for batch in batches[::2]) / 2
    assert result.loss == pytest.approx(right, rel=1e-6)


@plain_and_fused
def test_a_scaler_that_keeps_skipping_ends_in_an_error(make):  # point 6
    model = mlp(torch.float32)
    with pytest.raises(FloatingPointError, match="scale"):
        train_epoch(model, batches_with([math.nan] * 200), mse, make(model.parameters()),
                    amp=scaled())
    assert all(p.isfinite().all() for p in model.parameters())


@each("precision", [None, BF16])
@each("bad", BAD)
@each("option", [{}, {"log_every": 1}, {"accum": 2}, {"max_norm": 1.0}], ids=str)
def test_a_loss_that_is_not_finite_ends_the_epoch_and_names_the_step(precision, bad, option):  # A3
    model, good = mlp(torch.float32), [1.0] * 2 * option.get("accum", 1)
    with pytest.raises(FloatingPointError, match=r"step 3\b.*[Tt]ry"):
        train_epoch(model, batches_with([*good, bad, *good]), mse, SGD(model.parameters()),
                    amp=mixed_precision("cpu", precision), **option)


@each("device", ["cuda", "cuda:1", "xpu", "mps", "tpu", 3.5])
@each("ask", [mixed_precision, lambda d: to_gpu(torch.ones(1), d), lambda d: make_loader(
    ROWS, 4, device=d), lambda d: evaluate(mlp(), [], device=d), lambda d: split_model(
        [mlp()], [d]), lambda d: wrap_dataparallel(mlp(), [d, d])])
def test_an_absent_device_that_was_asked_for_is_an_error(ask, device, no_gpu):  # A5
    with pytest.raises(ValueError, match="device"):
        ask(device)


@each("asked, runs, scales", [("auto", BF16, False), (BF16, BF16, False), (FP16, FP16, True),
                              (None, torch.float32, False)])
def test_mixed_precision_runs_what_it_says_and_is_entered_again(asked, runs, scales):  # A5
    amp, model = mixed_precision("cpu", asked), nn.Linear(2, 2)
    for _ in range(2):
        with amp.autocast:
            assert model(torch.ones(1, 2)).dtype is runs
    assert model(torch.ones(1, 2)).dtype is torch.float32
    assert amp.scaler.is_enabled() is scales
    with pytest.raises(ValueError, match="precision"):
        mixed_precision("cpu", f"{asked} mode")


def test_autocast_that_is_on_already_goes_off_again():  # A5
    def loss_fn(model, batch):
        with amp.autocast:
            return cross_entropy(model, batch)

    model, amp = mlp(torch.float32, out=2), mixed_precision("cpu")
    batch = torch.randn(4, 3), torch.randint(2, (4,))
    amp_step(model, batch, loss_fn, SGD(model.parameters()), amp)
    assert not torch.is_autocast_enabled("cpu")
    with amp.autocast:
        evaluate(model, [batch], amp=amp)
    assert not torch.is_autocast_enabled("cpu")


@each("precision", [None, BF16, FP16])
def test_training_and_evaluation_run_in_the_precision_of_amp(precision):  # point 9
    seen, model, amp = [], mlp(torch.float32, out=2), mixed_precision("cpu", precision)
    model.register_forward_hook(lambda module, x, y: seen.append(y.dtype))
    batch = torch.randn(4, 3), torch.randint(2, (4,))
    amp_step(model, batch, cross_entropy, SGD(model.parameters()), amp)
    evaluate(model, [batch], amp=amp)
    assert seen == [precision or torch.float32] * 2 and model[0].weight.dtype is torch.float32


@pytest.mark.filterwarnings("ignore")  # torch says that there is no CUDA here
@each("hardware, right", [(True, BF16), (False, FP16)])
def test_emulated_bfloat16_is_not_chosen(hardware, right, monkeypatch):
    monkeypatch.setattr(ptspeed, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: including_emulation or hardware)
    assert mixed_precision("cuda").autocast.fast_dtype is right


def test_without_a_gpu_every_entry_point_runs_on_the_cpu_silently(no_gpu):  # point 10
    data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = split_model([mlp(torch.float32, out=2)], ["cpu"])
        assert all(wrap_dataparallel(model, ids) is model for ids in (None, [], ["cpu", "cpu"]))
        loader, amp = make_loader(data, 4, shuffle=True), mixed_precision(None)
        step = functools.partial(amp_step, model, loss_fn=cross_entropy,
                                 optimizer=SGD(model.parameters()))
        train_epoch(model, loader, cross_entropy, SGD(model.parameters()), amp=amp)
        assert 1 <= find_batch_size(lambda n: step(data[:n]), limit=2) <= 2
        assert evaluate(model, loader, amp=amp)[2] == 8 and not loader.pin_memory
        assert to_gpu(torch.ones(1)).device.type == "cpu"


# ---- evaluation ----------------------------------------------------------------------------------


@each("batch_size", [1, 2, 3, 5, 8])
def test_evaluation_is_exact_and_never_padded(batch_size):  # B3
    model, x, y = mlp(out=3), torch.randn(5, 3).double(), torch.randint(3, (5,))
    logits = model(x)
    right = F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double().mean().item(), 5
    result = evaluate(model, make_loader(TensorDataset(x, y), batch_size))
    assert result == pytest.approx(right, abs=1e-12) and isinstance(result[2], int)


@each("dtype", [torch.uint8, torch.int32, torch.float32])
def test_evaluation_takes_class_indices_of_any_width_and_nothing_else(dtype):
    model, x, y = mlp(out=2), torch.randn(2, 3).double(), torch.tensor([1, 0])
    wrong = pytest.raises(ValueError, match="indices")
    with wrong if dtype.is_floating_point else contextlib.nullcontext():
        assert evaluate(model, [(x, y.to(dtype))]) == evaluate(model, [(x, y)])


@each("fails", [False, True])
def test_evaluation_runs_in_eval_mode_and_puts_each_mode_back(fails):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3 + fails, 2))
    model[0].eval()
    modes, buffers = [m.training for m in model.modules()], copy.deepcopy([*model.buffers()])
    loader = [(torch.randn(4, 3), torch.randint(2, (4,)))]
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        assert evaluate(model, loader) == evaluate(model, loader)
    assert [m.training for m in model.modules()] == modes == [True, False, True, True]
    assert all(map(torch.equal, buffers, model.buffers())) and torch.is_grad_enabled()


# ---- 8 several GPUs in one process ---------------------------------------------------------------


class Wrap(nn.Linear):
    """A stage that puts its output into a container."""
    def forward(self, x):
        y = super().forward(x)
        return self.wrap(y, y * 2)


class Unwrap(nn.Linear):
    def forward(self, x):
        a, b = x.values() if isinstance(x, dict) else x
        return super().forward(a + b)


@each("chunks", [1, 2, 3, 7, 9])
@each("devices", [["cpu", "cpu"], [["cpu", "cpu"], "cpu"], ["cpu", ["cpu"]]], ids=str)
def test_a_split_model_equals_the_whole_one(chunks, devices):  # P1
    model, x = mlp(), torch.randn(7, 3).double()
    stages = copy.deepcopy(model)
    ours, right = split_model([stages[0], stages[1:]], devices, chunks=chunks)(x), model(x)
    for out in (ours, right):
        (out ** 2).mean().backward()
    assert close(ours, right)
    assert all(close(a.grad, b.grad) for a, b in zip(stages.parameters(), model.parameters()))


@each("chunks", [1, 3])
@each("wrap", [lambda *y: y, lambda *y: list(y), lambda a, b: {"a": a, "b": b}, Pair],
      ids=["tuple", "list", "dict", "namedtuple"])
def test_a_stage_that_returns_a_container_passes_it_on_whole(chunks, wrap):  # P2
    first, last, x = Wrap(3, 3).double(), Unwrap(3, 2).double(), torch.randn(7, 3).double()
    first.wrap = wrap
    whole = first(x)
    right = last(whole)
    alone = split_model([first], ["cpu"], chunks=chunks)(x)
    assert type(alone) is type(whole) and close(last(alone), right)
    assert close(split_model([first, last], ["cpu", "cpu"], chunks=chunks)(x), right)
    away = split_model([first, last], ["cpu", "meta"], chunks=chunks)(x)
    assert away.device.type == "meta" and away.shape == (7, 2)


class Call(nn.Module):
    """A stage that is one function."""
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


@each("fn", [lambda x: (x, x.mean()), lambda x: list(x), lambda x: tuple(x), lambda x: {*x},
             lambda x: {"y": x, "n": len(x)}, lambda x: nn.utils.rnn.pack_sequence([*x])],
      ids=["0-d", "list", "tuple", "set", "number", "packed"])
def test_outputs_that_chunks_cannot_put_together_are_an_error(fn):  # P2
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match="chunks=1"):
        split_model([Call(fn)], ["cpu"], chunks=2)(x)
    split_model([Call(fn)], ["cpu"])(x)


@each("x", [["a", "b", "c"], torch.tensor(2.0), {"n": 3}], ids=str)
def test_an_input_without_anything_to_cut_goes_through_once(x):  # P1
    seen = []
    model = split_model([Call(lambda x: seen.append(x) or torch.ones(3))], ["cpu"], chunks=3)
    assert len(model(x)) == 3 and len(seen) == 1


@each("stage", [nn.ReLU(inplace=True), Call(lambda x: x.sub_(1).div_(2)), nn.Identity()], ids=str)
def test_a_stage_that_works_in_place_equals_the_whole_model_in_chunks_too(stage):  # P1
    last, x = nn.Linear(3, 2), torch.randn(5, 3)
    grads = []
    for chunks in (1, 3):
        model = split_model([nn.Sequential(stage, last)], ["cpu"], chunks=chunks)
        model(x.clone()).square().sum().backward()
        grads.append(last.weight.grad)
        last.weight.grad = None
    assert close(*grads, 1e-5)


def test_weights_tied_over_different_devices_are_an_error_and_on_one_device_are_not():
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    with pytest.raises(ValueError, match="tied"):
        split_model([first, last], ["cpu", "meta"])
    split_model([first, last], ["cpu", "cpu"])
    assert last.weight is first.weight and last.bias.device.type == "cpu"


# ---- on a GPU ------------------------------------------------------------------------------------


def gpus(n):
    """Marks a test that needs n GPUs."""
    few = pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n} CUDA GPU")
    return lambda test: pytest.mark.gpu(few(test))


@gpus(1)
def test_batches_for_a_gpu_are_pinned_and_others_are_not():
    pinned = [[x.is_pinned() for x, _ in make_loader(ROWS, 4, device=d)] for d in ("cuda", "cpu")]
    assert pinned == [[True] * 3, [False] * 3]
    on_gpu = make_loader(TensorDataset(*to_gpu(ROWS.tensors)), 4)
    assert torch.equal(next(iter(on_gpu))[0].cpu(), ROWS.tensors[0][:4])


@gpus(1)
@each("fused", [False, True])
@each("precision", ["auto", BF16, FP16, None])
def test_a_step_on_the_gpu_is_near_the_float64_oracle(precision, fused):
    oracle, batches = mlp(), micro_batches([4, 4, 2])
    model, amp = copy.deepcopy(oracle).float().to("cuda"), mixed_precision("cuda", precision)
    singles = [tuple(field.float() for field in batch) for batch in batches]
    optimizer = SGD(model.parameters(), fused=fused)
    assert any(accumulate_step(model, singles, mse, optimizer, amp, max_norm=1e3).stepped
               for _ in range(20))  # float16 may skip at first
    oracle_step(oracle, concatenated(batches), mse, SGD(oracle.parameters()))
    assert close(model.cpu().double(), oracle, 5e-3)


@gpus(1)
@each("precision", [BF16, None])
def test_no_step_waits_for_the_gpu(precision):  # G6
    model, amp = mlp(torch.float32).to("cuda"), mixed_precision("cuda", precision)
    batches = to_gpu(micro_batches([4, 2], torch.float32))
    step = functools.partial(accumulate_step, model, batches, mse, SGD(model.parameters()), amp)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = [step() for _ in range(3)][-1]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.loss.is_cuda and math.isfinite(result.loss.item())


@gpus(2)
@each("chunks", [0, 1, 3])  # 0: DataParallel
@each("devices", [["cuda:0", "cuda:1"], [["cuda:0", "cuda:1"], "cuda:0"]], ids=str)
def test_a_model_over_two_gpus_equals_the_whole_one(devices, chunks):
    oracle, (x, y) = mlp(), micro_batches([7])[0]
    stages = copy.deepcopy(oracle)
    if chunks:
        model = split_model([stages[0], stages[1:]], devices, chunks=chunks)
    else:
        model = wrap_dataparallel(stages, [0, 1])
        assert isinstance(model, nn.DataParallel)
    amp_step(model, (x, y), lambda m, b: F.mse_loss(out := m(b[0]), b[1].to(out.device)),
             SGD(model.parameters()))
    oracle_step(oracle, (x, y), mse, SGD(oracle.parameters()))
    assert close(stages.cpu(), oracle)


# ==================================================================================================
# Part II: the job
# ==================================================================================================

KEYS = ("device torch data model params batch_size accum world global_batch lr amp workers epochs"
        " loss accuracy samples_per_s wait peak_memory_mb skipped_steps seconds").split()
TINY = ["--data", "test_ptspeed:tiny_data", "--model", "test_ptspeed:tiny_model",
        "--batch-size", "8", "--epochs", "3"]
HERE = os.path.dirname(os.path.abspath(__file__))


def yields():
    yield from tiny_data()


def tiny_data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return TensorDataset(x[:45], y[:45]), TensorDataset(x[45:], y[45:])


def tiny_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


class Noisy(torch.utils.data.Dataset):
    """Augments at random, with each of the three generators that data sets use."""
    classes = "ab"

    def __init__(self, n):
        self.data = Subset(tiny_data()[0], range(n))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        import numpy
        x, y = self.data[i]
        return x + torch.rand(()) / 9 + random.random() / 9 + float(numpy.random.rand()) / 9, y


def noisy_data():
    return Noisy(45), Noisy(10)


def nine_samples():
    x, y = tiny_data()[0].tensors
    return TensorDataset(x[:9], y[:9]), TensorDataset(x[9:18], y[9:18])


def norm_model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


def infinite_data():
    train, test = tiny_data()
    train.tensors[0][:] = math.inf
    return train, test


def image_data():
    x = torch.randint(256, (24, 1, 32, 32), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x.byte(), torch.arange(24) % 3)
    return data, data


def returns_nothing():
    return None


def leaves():
    sys.exit(0)


def streams():
    return Stream(), Stream()


def with_targets(*targets):
    train, test = tiny_data()
    return TensorDataset(train.tensors[0][:len(targets)], torch.tensor(targets)), test


def negative_data():
    return with_targets(0, 1, -1)


def huge_targets():
    return with_targets(0, 1, 2**40)


def three_classes():
    return with_targets(0, 1, 2)


def one_hot_data():
    return with_targets([0, 1], [1, 0])


def late(train):
    """Two good samples, which the check of the model sees, and then what the data set says."""
    class Late(torch.utils.data.Dataset):
        classes = "ab"

        def __len__(self):
            return 45

        def __getitem__(self, i):
            return train(i) if i > 1 else tiny_data()[0][i]

    return Late(), tiny_data()[1]


def late_target():
    return late(lambda i: (torch.zeros(8), 2))


def late_negative_target():
    return late(lambda i: (torch.zeros(8), -1))


def ragged():
    return late(lambda i: (torch.zeros(i), 0))


def leaves_late():
    return late(sys.exit)


class Resting(nn.Module):
    """Has a layer that takes no part in the first steps, as with layer drop."""
    def __init__(self):
        super().__init__()
        self.steps, self.head, self.layer = 0, nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x):
        self.steps += self.training
        return self.head(self.layer(x) if self.steps > 3 or not self.training else x)


def frozen():
    return tiny_model().requires_grad_(False)


def no_parameters():
    return nn.Sequential(nn.Identity())


def write_idx(path, data):
    """A tensor as a file of MNIST's format."""
    shape = b"".join(n.to_bytes(4, "big") for n in data.shape)
    path.write_bytes(bytes([0, 0, 8, data.dim()]) + shape + bytes(data.flatten().tolist()))


@pytest.fixture
def small_mnist(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 24), ("t10k", 8)):
        write_idx(raw / f"{part}-images-idx3-ubyte", torch.randint(256, (n, 28, 28)))
        write_idx(raw / f"{part}-labels-idx1-ubyte", torch.arange(n) % 10)
    return raw


@pytest.fixture
def no_network(monkeypatch):
    def refused(self):
        raise RuntimeError("no network")

    monkeypatch.setattr("torchvision.datasets.mnist.MNIST.download", refused)


@pytest.fixture
def job(capsys):
    """Runs the job in this process: (exit status, lines on standard output, lines on error)."""
    def run(*flags, main=ptspeed.main):
        try:
            status = main([str(flag) for flag in flags])
        except SystemExit as end:
            status = end.code
        out = capsys.readouterr()
        return status, out.out.splitlines(), out.err.splitlines()
    return run


def test_importing_prints_nothing_warns_of_nothing_and_leaves_torchvision_out():
    code = "import ptspeed, sys; sys.exit('torchvision' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=HERE,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "ptspeed" not in done.stderr


@each("flags, amp", [([], None), (["--amp"], "bf16")])
def test_the_job_learns_and_its_summary_has_every_key(job, flags, amp):  # A5
    status, out, err = job("--data", "synthetic", "--epochs", 1, "--accum", 4, "--json", *flags)
    summary = json.loads(out[-1])
    assert (status, err, sorted(summary)) == (0, [], sorted(KEYS))
    assert summary["accuracy"] >= 0.9 and summary["amp"] == amp and summary["data"] == "synthetic"
    assert (summary["global_batch"], summary["lr"], summary["params"]) == (256, 0.2, 33658)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(job):
    losses = [json.loads(job(*TINY, "--json", "--seed", seed)[1][-1])["loss"] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_without_mnist_and_network_auto_says_so_and_mnist_is_an_error(
        job, tmp_path, no_network):  # L8
    status, out, err = job("--root", tmp_path, "--epochs", 1, "--json")
    assert (status, err, json.loads(out[-1])["data"]) == (0, [], "synthetic")
    assert "no MNIST" in out[0] and "synthetic" in out[0]
    status, out, err = job("--root", tmp_path, "--data", "mnist")
    assert (status, out, len(err)) == (2, [], 1) and "MNIST" in err[0]


def test_mnist_files_are_read_as_torchvision_reads_them(job, small_mnist):
    from torchvision.datasets import MNIST
    root = small_mnist.parents[1]
    train = ptspeed.mnist(root).train.tensors
    assert torch.equal(train[0], MNIST(root).data) and torch.equal(train[1], MNIST(root).targets)
    assert json.loads(job("--root", root, "--epochs", 1, "--json")[1][-1])["data"] == "mnist"


def test_a_data_function_may_yield_its_two_sets(job):
    assert job("--data", "test_ptspeed:yields", *TINY[2:], "--epochs", 1)[0] == 0


@each("damage", [lambda b: b[:-1], lambda b: b[:3], lambda b: b"", lambda b: b + b"x",
                 lambda b: b"<html>not found</html>", lambda b: bytes(len(b)),
                 lambda b: b[:-1] + b"\xff"])
@each("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_damaged_mnist_file_is_named_in_one_line(job, small_mnist, damage, name):  # L7
    file = small_mnist / name
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    status, out, err = job("--root", small_mnist.parents[1], "--epochs", 1)
    if "images" in name and damaged.endswith(b"\xff") and len(damaged) > 100:
        assert status == 0  # a white pixel is no damage
    else:
        assert (status, len(err)) == (2, 1) and str(file) in err[0] and "delete" in err[0]


@each("flags", [
    "--epochs 0", "--epochs x", "--epochs 1.5", "--batch-size 0", "--batch-size -1",
    "--batch-size big", "--accum 0", "--workers -1", "--lr nan", "--lr inf", "--lr -1", "--lr x",
    "--seed -1", "--amp int8", "--device tpu9", "--device cuda:99", "--device meta", "--nonsense",
    "--parallel some", "--model nonsense", "--model nothing:here", "--model test_ptspeed:absent",
    "--model test_ptspeed:returns_nothing", "--model test_ptspeed:image_data", "--data nonsense",
    "--data nothing:here", "--data test_ptspeed:returns_nothing", "--data :", "--model :",
    "--model alexnet", "--model cnn --data test_ptspeed:tiny_data", "--checkpoint /nowhere/file",
    "--parallel split --model resnet18", "--parallel dp --compile", "--checkpoint=",
    "--checkpoint .git/", "--checkpoint /dev/null", "--compare --checkpoint file",
    "--data test_ptspeed:leaves", "--data test_ptspeed:streams",
    "--data test_ptspeed:one_hot_data",
    "--data test_ptspeed:negative_data", "--data test_ptspeed:huge_targets",
    "--data test_ptspeed:late_target --model test_ptspeed:tiny_model",
    "--data test_ptspeed:late_negative_target --model test_ptspeed:tiny_model",
    "--data test_ptspeed:ragged --model test_ptspeed:tiny_model --workers 0",
    "--data test_ptspeed:ragged --model test_ptspeed:tiny_model --workers 1",
    "--data test_ptspeed:tiny_data --model test_ptspeed:frozen",
    "--data test_ptspeed:tiny_data --model test_ptspeed:no_parameters",
    "--data test_ptspeed:three_classes --model test_ptspeed:tiny_model"])
def test_bad_input_is_one_line_and_exit_status_2(job, flags):
    status, out, err = job("--data", "synthetic", *flags.split())
    assert (status, len(err)) == (2, 1), err
    assert err[0].startswith("ptspeed.py: ") and "Traceback" not in err[0]


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(job):  # A3
    status, out, err = job(*TINY, "--data", "test_ptspeed:infinite_data")
    assert (status, len(err)) == (1, 1) and "step 1" in err[0] and "try" in err[0]


@each("error, status, word", [
    (KeyboardInterrupt(), 130, "interrupted"), (torch.OutOfMemoryError("x"), 1, "--batch-size"),
    (RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed."), 1, "memory"),
    (RuntimeError("DataLoader worker (pid 1) is killed by signal: Bus error. shm"), 1, "/dev/shm"),
    (OSError(errno.EMFILE, "Too many open files"), 1, "ulimit")])
def test_what_ends_a_run_is_told_in_one_line(job, monkeypatch, error, status, word):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(ptspeed, "train_epoch", fails)
    ended, out, err = job(*TINY)
    assert (ended, len(err)) == (status, 1) and word in err[0]


@each("where", ["classify", "place_model", "amp_step", "evaluate"])
def test_out_of_memory_anywhere_is_told_with_its_remedy(job, monkeypatch, where):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ptspeed, where, fails)
    monkeypatch.setattr(ptspeed, "find_batch_size", lambda step, **kwargs: step(1) or 8)
    ended, out, err = job(*TINY, "--batch-size", "auto")
    assert (ended, len(err)) == (1, 1) and "out of memory: lower --batch-size" in err[0]


@each("flags", [[], ["--compare"]])
def test_a_data_set_that_exits_has_not_trained_to_the_end(job, short_turns, flags):
    status, out, err = job(*TINY, "--data", "test_ptspeed:leaves_late", "--workers", 0, *flags)
    assert (status, len(err)) == (1, 1) and "left early with SystemExit" in err[0]


@each("fused", ["--fused", "--no-fused"])
def test_a_layer_that_rests_in_the_first_steps_trains(job, fused):
    status, out, err = job(*TINY, "--model", "test_ptspeed:Resting", fused)
    assert (status, err) == (0, [])


def test_a_lone_last_sample_is_dropped_for_batchnorm_alone(job, monkeypatch):  # L4
    seen, original = [], ptspeed.train_epoch
    monkeypatch.setattr(ptspeed, "train_epoch", lambda *a, **k: seen.append(original(*a, **k))
                        or seen[-1])
    for model in ("norm_model", "tiny_model"):
        status, out, err = job(*TINY, "--data", "test_ptspeed:nine_samples", "--epochs", 1,
                               "--model", f"test_ptspeed:{model}", "--json")
        assert status == 0 and json.loads(out[-1])["accuracy"] * 9 == pytest.approx(
            round(json.loads(out[-1])["accuracy"] * 9))
    assert [epoch.samples for epoch in seen] == [8, 9]


@each("shape", [(2, 28, 28), (2, 1, 28, 28)])
@each("channels", [1, 3])
def test_images_cross_as_bytes_and_the_model_gets_them_normalised(shape, channels):
    x = torch.randint(256, shape, dtype=torch.uint8)
    model = ptspeed.Normalize(nn.Sequential(nn.Conv2d(channels, 1, 1), nn.Identity()))
    model.model = nn.Identity()
    expected = ((x.double() / 255 - 0.1307) / 0.3081).reshape(2, 1, 28, 28)
    assert torch.allclose(model(x).double(), expected.expand(-1, channels, -1, -1), atol=1e-5)


def test_a_torchvision_model_gets_the_right_classes_and_channels(job):
    args = ptspeed.make_parser().parse_args(["--model", "resnet18"])
    data = ptspeed.custom_data("test_ptspeed:image_data")
    model = ptspeed.place_model(args, ptspeed.build_model(args, data), torch.device("cpu")).eval()
    assert model(image_data()[0].tensors[0][:2]).shape == (2, 3)


def test_a_split_model_trains_to_the_same_loss(job):
    flags = ["--data", "synthetic", "--epochs", 1, "--batch-size", 512, "--json"]
    whole, split = (json.loads(job(*flags, "--parallel", p)[1][-1]) for p in ("none", "split"))
    assert whole["loss"] == pytest.approx(split["loss"], abs=1e-4)
    assert whole["params"] == split["params"] == 33658


def test_the_rate_warms_up_peaks_once_and_ends_near_0():
    rates = [ptspeed.lr_factor(step, 100) for step in range(100)]
    top = rates.index(1.0)
    assert rates[:top + 1] == sorted(rates[:top + 1]) and rates[top:] == sorted(rates[top:])[::-1]
    assert 0 < rates[0] <= 0.1 and 0 < rates[-1] < 0.02 and ptspeed.lr_factor(0, 1) == 1.0


class Masked(torch.utils.data.Dataset):
    """Says whether its process is deaf to Ctrl-C."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.skipif(os.name == "nt", reason="has no such signals")
def test_ctrl_c_is_for_the_main_process_alone():
    deaf = [list(make_loader(Masked(), 4, num_workers=n))[0].all().item() for n in (0, 1)]
    assert deaf == [False, True] and not Masked()[0]


def test_a_full_shared_memory_is_told_before_workers_wait_for_ever(job, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    status, out, err = job(*TINY, "--workers", 1)
    assert (status, len(err)) == (1, 1) and "/dev/shm" in err[0]


def test_a_batch_size_is_found_whatever_the_rate_and_fits_a_ranks_share():
    args = ptspeed.changed(ptspeed.make_parser().parse_args(TINY), lr=1e38, amp="fp16")
    data = ptspeed.load_data(args)
    assert 1 <= ptspeed.auto_batch_size(args, data, world=4) <= 45 // 4


@each("flags", ["--batch-size 1", "--batch-size 1 --data test_ptspeed:nine_samples", "--compare",
                "--batch-size auto"])
def test_batchnorm_on_one_sample_is_told_in_one_line(job, monkeypatch, flags):
    if "--batch-size 1" not in flags:
        monkeypatch.setattr(ptspeed, "load_data", lambda args: ptspeed.Data(
            "x", *[Subset(part, [0]) for part in tiny_data()], 2))
    status, out, err = job(*TINY, "--model", "test_ptspeed:norm_model", *flags.split())
    assert (status, len(err)) == (2, 1) and "BatchNorm" in err[0] and "--batch-size" in err[0]


class Views(nn.Module):
    """What many tutorials write, which needs the classic memory format."""
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 30 * 30, 3)

    def forward(self, x):
        return self.head(self.conv(x).view(len(x), -1))


def test_a_model_that_cannot_do_channels_last_is_told_the_flag(job):
    flags = ["--data", "test_ptspeed:image_data", "--model", "test_ptspeed:Views", "--epochs", 1]
    status, out, err = job(*flags)
    assert (status, len(err)) == (2, 1) and "try --no-channels-last" in err[0]
    assert job(*flags, "--no-channels-last", "--no-fused")[0] == 0


def test_a_batch_size_is_found_and_printed(job):
    status, out, err = job(*TINY, "--batch-size", "auto", "--json")
    assert status == 0 and 1 <= json.loads(out[-1])["batch_size"] <= 45
    assert f"global batch {json.loads(out[-1])['batch_size']} x" in "".join(out)


def readme(kind):
    """The code blocks of a kind that the README prints."""
    with open(os.path.join(HERE, "README.md")) as file:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", file.read(), re.DOTALL | re.MULTILINE)
    return [text for language, text in blocks if language == kind]


def test_the_readmes_recipe_for_an_image_folder_trains(job, tmp_path, monkeypatch):
    from torchvision.transforms.functional import to_pil_image
    for i, part in itertools.product(range(4), ("train", "test")):
        folder = tmp_path / "images" / part / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        to_pil_image(torch.rand(3, 40, 50)).save(folder / f"{i}.jpg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(readme("python")[0])
    command = next(line for line in "".join(readme("")).splitlines() if "--batch-size 16" in line)
    status, out, err = job(*command.split()[2:], "--epochs", 1, "--json")
    assert (status, err) == (0, []) and json.loads(out[-1])["data"] == "mine:load"


def test_the_readmes_recipe_for_tokens_learns(capsys):
    exec(compile(readme("python")[1], "README.md", "exec"), {"__name__": "recipe"})
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] / 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept_for_the_next_step_and_is_no_peak():
    code = """if True:
        import resource, torch, ptspeed
        def step(mb=64):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(mb * 2**18)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        def peak(mb):
            ptspeed.reset_peak_memory()
            step(mb)
            return ptspeed.peak_memory_mb(torch.device("cpu"))
        given_back = min(step() for _ in range(20))
        print(ptspeed.keep_freed_memory(), given_back, min(step() for _ in range(20)))
        print(peak(512) - peak(64), peak(512) - peak(64))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    (kept, before, after), peaks = (line.split() for line in done.stdout.splitlines())
    assert kept == "True" and int(before) > 10_000 > 100 > int(after)
    assert all(float(mb) == pytest.approx(448, rel=0.05) for mb in peaks)


def test_without_glibc_memory_is_left_to_the_system(monkeypatch):
    monkeypatch.setattr(ptspeed.ctypes, "CDLL", lambda name: object())
    assert ptspeed.keep_freed_memory() is False
    ptspeed.reset_peak_memory()


@each("kwargs, given_back", [({"num_workers": 0}, 0), ({"num_workers": 1}, 2),
                             ({"num_workers": 1, "persistent_workers": True}, 0)], ids=str)
def test_free_memory_goes_back_before_workers_are_forked(kwargs, given_back, monkeypatch):
    calls = []
    monkeypatch.setattr(ptspeed, "_libc", lambda *call: calls.append(call))
    loader = ptspeed.make_loader(TensorDataset(torch.zeros(4)), 2, **kwargs)
    assert [len(list(loader)) for _ in range(2)] == [2, 2]
    assert calls == [("malloc_trim", 0)] * given_back


# ---- --compare -----------------------------------------------------------------------------------


class FakeTrial:
    """Its flags say how fast it is and what memory it needs; its speed is jittered by 5 %."""
    first_s, memory = 0.0, 100.0

    def __init__(self, args, data):
        self.args = args

    def turn(self, seconds):
        return 1000 * self.args.speed * random.uniform(0.95, 1.05)

    def memory_mb(self):
        return self.memory / self.args.accum


@pytest.fixture
def table(monkeypatch, capsys):
    """Makes the table of a naive loop whose speed is 1."""
    monkeypatch.setattr(ptspeed, "Trial", FakeTrial)
    args = ptspeed.changed(ptspeed.make_parser().parse_args([]), speed=1)
    return lambda: ptspeed.Comparison(args, ptspeed.Data("fake", [0], [0], 1))


@each("speed, verdict, kept", [(1, "within noise", 1), (1.34, "pays 1.", 1.34), (0.7, "costs ", 1)])
def test_a_gain_is_kept_a_cost_is_dropped_and_noise_is_called_noise(speed, verdict, kept, table):
    right = 0
    for seed in range(20):
        random.seed(seed)
        done = table()
        done.attempt("1", "fake", make=FakeTrial, speed=speed)
        right += done.rows[-1]["verdict"].startswith(verdict) and done.kept.args.speed == kept
    assert right >= 19


def test_accumulation_is_judged_by_its_memory_and_never_kept(table):
    done = table()
    assert not done.attempt("4", "fake", make=FakeTrial, keep=(), accum=4, speed=0.5)
    assert done.rows[-1]["verdict"] == "pays 4.00x (memory)" and done.kept is done.naive


def test_a_technique_that_fails_is_a_row_with_its_reason(table):
    done = table()
    assert not done.attempt("1", "fake", make=FakeTrial, speed="no number")
    assert done.rows[-1]["verdict"].startswith("not here: TypeError ")


@pytest.fixture
def short_turns(monkeypatch):
    for name, short in {"Comparison": {"seconds": 0.005, "turns": 2},
                        "bottleneck": {"seconds": 0.005}}.items():
        monkeypatch.setattr(ptspeed, name, functools.partial(getattr(ptspeed, name), **short))
    monkeypatch.setattr(ptspeed, "measure", lambda step, seconds: step() or 1.0)


def test_compare_ends_with_a_command_that_runs(job, short_turns):
    status, out, err = job(*TINY, "--compare")
    assert status == 0 and any("workers" in row and row.startswith("2") for row in out)
    assert [row[0] for row in out[2:-2] if row[:11] != "2 workers: "] == list(
        "01345667889++=")
    assert out[-2].startswith("python ptspeed.py ") and "torch " in out[-1]
    assert job(*out[-2].split()[2:], "--epochs", 1)[0] == 0


def test_a_comparison_that_is_stopped_shows_its_rows_and_the_command_so_far(job, short_turns,
                                                                            monkeypatch):
    def stopped(args, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(ptspeed, "ddp_run", stopped)
    status, out, err = job(*TINY, "--compare")
    assert (status, len(err)) == (130, 1) and "interrupted" in err[0] and out[-3][0] == "8"
    assert out[-2].startswith("python ptspeed.py ") and "fused" not in out[-2]  # not yet tried


class Rows(nn.Module):
    """Reads an image [N, H, W] row by row."""
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def flat(*shape):
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 2))


@each("n, shape, dtype, model", [
    (40, (8,), torch.uint8, flat(8)), (40, (8, 8), torch.uint8, Rows),
    (40, (8, 8, 3), torch.uint8, flat(8, 8, 3)),
    (40, (3, 8, 8), torch.uint8, lambda: nn.Sequential(nn.Conv2d(3, 2, 8), nn.Flatten())),
    (1, (8,), torch.float32, flat(8)), (333, (1, 8, 8), None, flat(8, 8))])
def test_compare_takes_whatever_the_job_takes(n, shape, dtype, model, job, short_turns,
                                              monkeypatch):
    def absent(args, data):
        raise ptspeed.RunFailed("left out")

    x, y = torch.randint(256, (n, *shape)), torch.arange(n) % 2
    data = TensorDataset(x.to(dtype or torch.float32), y)
    if dtype is None:  # without a tensor to index
        data = [(a, int(b)) for a, b in data]
    monkeypatch.setenv("CXX", "no compiler")
    monkeypatch.setattr(ptspeed, "ddp_run", absent)
    monkeypatch.setattr(ptspeed, "load_data", lambda args: ptspeed.Data("x", data, data, 2))
    monkeypatch.setattr(ptspeed, "build_model", lambda args, data: model())
    status, out, err = job("--compare", "--json")
    rows = json.loads(out[-1])["rows"]
    assert status == 0 and json.loads(out[-1])["command"].startswith("python ptspeed.py ")
    failed = {row["technique"] for row in rows if row["verdict"].startswith("not here")}
    assert failed == {"8", "9", "+"} | ({"1"} if dtype is None else set())


@each("changes", [
    {}, {"channels_last": False}, {"fused": False, "compile": True}, {"workers": 0, "amp": "auto"},
    {"batch_size": 7, "lr": 0.5, "model": "a b:c", "parallel": "split"}], ids=str)
def test_the_command_says_what_was_measured(changes):
    args = ptspeed.changed(ptspeed.make_parser().parse_args([]), **changes)
    again = ptspeed.make_parser().parse_args(ptspeed.flag_words(args, "parallel"))
    assert ptspeed.changed(again, parallel=args.parallel) == args


@each("accum, workers, n", [(1, 0, 1), (3, 0, 3), (1, 3, 3), (2, 3, 4), (4, 3, 4)])
def test_a_turn_is_whole_windows_and_whole_bursts_of_workers(accum, workers, n):
    trial = ptspeed.Trial.__new__(ptspeed.Trial)
    trial.args, trial.workers = ptspeed.argparse.Namespace(accum=accum), workers
    trial.batches = itertools.count()
    assert list(trial.some(0)) == list(range(n))
    assert len(list(trial.some(0.001))) % n == 0


@each("workers, first", [(0, 0), (1, 3), (2, 5)])
def test_what_workers_fetched_in_the_turns_of_others_is_not_timed(workers, first, monkeypatch):
    trial, trained = ptspeed.Trial.__new__(ptspeed.Trial), []

    def train(batches):
        trained.append(list(batches))
        return ptspeed.argparse.Namespace(samples=1, seconds=1)

    monkeypatch.setattr(trial, "train", train, raising=False)
    trial.args, trial.workers = ptspeed.argparse.Namespace(accum=1), workers
    trial.batches = itertools.count()
    trial.turn(0)  # a queue of two for each worker, and one batch more to fill it again
    assert trained[-1][0] == first


def test_a_variant_is_timed_without_training_in_earnest():
    args = ptspeed.changed(ptspeed.make_parser().parse_args(TINY), lr=1e38)
    trial = ptspeed.Trial(args, ptspeed.load_data(args))
    assert trial.turn(0.02) > 0 and trial.args.lr == 1e38


@each("first, tried", [(0, [1, 2]), (2, [1, 2, 4]), (99, [1, 2, 4, 8])])
def test_workers_climb_while_they_gain_and_two_are_tried_in_any_case(first, tried, table,
                                                                     monkeypatch):
    seen = []

    def attempt(number, name, **flags):
        if "workers" in flags:
            seen.append(flags["workers"])
        return seen[-1] <= first if seen else False

    monkeypatch.setattr(ptspeed, "usable_cpus", lambda: 2)
    done = table()
    done.kept.args.device = "cpu"
    monkeypatch.setattr(done, "attempt", attempt)
    done.techniques()
    assert seen == tried


def test_a_terminated_comparison_ends_its_ddp_run(monkeypatch):
    def run(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    monkeypatch.setattr(subprocess, "run", run)
    args = ptspeed.changed(ptspeed.make_parser().parse_args(TINY), world=2, workers=0)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):  # upon which the real run() kills its child
        ptspeed.ddp_run(args, ptspeed.load_data(args))
    assert signal.getsignal(signal.SIGTERM) is before


# ---- checkpoints ---------------------------------------------------------------------------------


def tiny_weight():
    torch.manual_seed(0)
    return tiny_model()[0].bias[:4].tolist()


def flip(data, inside):
    """One bit of a weight flipped, as a dying disk does."""
    at = data.index(inside)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]


def same(a, b):
    """Whether two nestings of tensors and values agree to the bit."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def interrupt_at(monkeypatch, name, call, error):
    """Makes the n-th call of a function raise."""
    owner, _, attribute = name.rpartition(".")
    owner = sys.modules[owner]
    calls, original = itertools.count(1), getattr(owner, attribute)

    def interrupted(*args, **kwargs):
        if next(calls) == call:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, interrupted)


@each("flags", [[], ["--data", "test_ptspeed:noisy_data", "--workers", "2"],
                ["--data", "test_ptspeed:noisy_data", "--workers", "0"], ["--amp", "fp16"]])
@each("where, call", [("ptspeed.train_epoch", 2), ("os.fsync", 2), ("os.replace", 3)])
def test_a_run_that_was_stopped_anywhere_resumes_to_the_bit(job, tmp_path, flags, where, call):
    files = tmp_path / "undisturbed", tmp_path / "stopped"
    command = [*TINY, *flags, "--checkpoint"]
    assert job(*command, files[0])[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, where, call, KeyboardInterrupt())
        assert job(*command, files[1])[0] == 130
    status, out, err = job(*command, files[1])
    assert (status, err) == (0, [])
    states = [torch.load(file, weights_only=True) for file in files]
    assert same(*states) and states[0]["epoch"] == 3
    assert sorted(os.listdir(tmp_path)) == ["stopped", "undisturbed"]
    status, out, err = job(*command, files[1])
    assert status == 0 and any("finished" in line for line in out)


@each("where", ["os.fsync", "os.replace"])
def test_a_save_that_fails_names_the_path_and_leaves_the_previous_file(
        job, tmp_path, monkeypatch, where):  # K1
    file = tmp_path / "file"
    interrupt_at(monkeypatch, where, 2, OSError(errno.ENOSPC, "No space left on device"))
    status, out, err = job(*TINY, "--checkpoint", file)
    assert (status, len(err)) == (1, 1) and str(file) in err[0] and "No space" in err[0]
    assert torch.load(file, weights_only=True)["epoch"] == 1 and os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="no file size limit to set")
def test_a_disk_that_is_full_ends_the_run_and_leaves_the_previous_file(job, tmp_path):  # K1
    file = tmp_path / "file"
    assert job(*TINY, "--epochs", 1, "--checkpoint", file)[0] == 0
    before = file.read_bytes()
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) // 2},) * 2)"
    code = (f"import ptspeed, resource, sys, torch.distributed.nn; {limit};"  # which writes a file
            " ptspeed.main(sys.argv[1:])")
    done = subprocess.run([sys.executable, "-c", code, *TINY, "--checkpoint", file], cwd=HERE,
                          capture_output=True, text=True)
    assert done.returncode == 1 and str(file) in done.stderr and done.stderr.count("\n") == 1
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["file"]


def saved(what):
    """The bytes of a file that torch.save writes."""
    torch.save(what, file := io.BytesIO())
    return file.getvalue()


@each("damage", [lambda b: b"", lambda b: b[:-100], lambda b: b[:50], lambda b: b"hello\n",
                 lambda b: pickle.dumps({"ptspeed": 1}), lambda b: saved(torch.ones(2)),
                 lambda b: b[:200] + bytes(99) + b[299:],
                 lambda b: flip(b, struct.pack("<4f", *tiny_weight()))])
def test_a_damaged_checkpoint_is_named_and_left_alone(job, tmp_path, recwarn, damage):  # K2
    file = tmp_path / "file"
    job(*TINY, "--epochs", 1, "--lr", 0, "--checkpoint", file)
    file.write_bytes(damaged := damage(file.read_bytes()))
    status, out, err = job(*TINY, "--checkpoint", file)
    assert (status, len(err)) == (2, 1) and str(file) in err[0] and not recwarn.list
    assert file.read_bytes() == damaged


@each("place", ["absent/file", ""])
def test_a_place_that_cannot_be_written_is_found_before_the_first_step(
        job, tmp_path, monkeypatch, place):  # K3
    monkeypatch.setattr(ptspeed, "train_epoch", None)
    status, out, err = job(*TINY, "--checkpoint", tmp_path / place)
    assert (status, len(err)) == (2, 1) and str(tmp_path) in err[0] and not os.listdir(tmp_path)


def test_more_epochs_go_on_and_a_contradicting_flag_is_named_with_both_values(
        job, tmp_path):  # K5
    file = ["--checkpoint", tmp_path / "file"]
    assert job(*TINY, *file)[0] == 0
    status, out, err = job(*TINY, *file, "--epochs", 5)
    assert status == 0 and [line[:9] for line in out if line.startswith("epoch")] == [
        "epoch 4/5", "epoch 5/5"]
    for flag, value in (("model", "test_ptspeed:norm_model"), ("data", "test_ptspeed:noisy_data")):
        status, out, err = job(*TINY, *file, f"--{flag}", value)
        old = dict(zip(TINY[::2], TINY[1::2]))[f"--{flag}"]
        assert (status, len(err)) == (2, 1)
        assert all(word in err[0] for word in (f"--{flag}", value, old))


def test_a_found_batch_size_is_reused_when_the_run_goes_on(job, tmp_path, monkeypatch):
    flags = [*TINY, "--batch-size", "auto", "--checkpoint", tmp_path / "file", "--json"]
    first = json.loads(job(*flags)[1][-1])["batch_size"]
    monkeypatch.setattr(ptspeed, "find_batch_size", None)
    assert json.loads(job(*flags, "--epochs", 4)[1][-1])["batch_size"] == first


# ==================================================================================================
# Technique 9: ptspeed_ddp.py, on real gloo ranks
# ==================================================================================================


def in_rank(rank, port, folder):
    """Runs every check on 3 ranks and on 2 of them; saves what it saw for the tests."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3,
                            timeout=datetime.timedelta(seconds=20))
    groups = {3: dist.group.WORLD, 2: dist.new_group([0, 1])}
    told = raised_by_rank_0(rank)
    for world, group in list(groups.items())[:1 + (rank < 2)]:
        ddp = functools.partial(wrapped, group)
        seen = {"weighted": [weighted_step(rank, ddp, compiled) for compiled in (False, True)],
                "reduces": [count_reduces(ddp, group, compiled) for compiled in (False, True)],
                "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                "empty": nothing_anywhere(ddp), "buffers": trained_buffers(ddp, rank), "told": told,
                "evaluated": [evaluate_shard(ddp, rank, world, n) for n in (5, 1)],
                "trained": train_shard(ddp, rank, world)}
        torch.save(seen, os.path.join(folder, f"{world}.{rank}"))
    dist.barrier()
    dist.destroy_process_group()
    del groups, group, ddp
    gc.collect()


def raised_by_rank_0(rank):
    def ask():
        raise ptspeed.BadInput("bad" if rank == 0 else "never asked")

    with pytest.raises(ptspeed.BadInput) as info:
        ptspeed.from_rank_0(ask)
    return str(info.value), ptspeed.from_rank_0(lambda: rank)


def wrapped(group, model, compiled=False):
    if compiled:
        model = ptspeed.Normalize(model)
        model.compile(backend="eager")  # in place and before the wrap, as the job does
    return DistributedDataParallel(model, process_group=group)


def targets_of(batch):
    return int((batch[1] >= 0).sum())


def masked_output(model, batch):
    """The mean output over the targets that count: 0/0 where there is none."""
    mask = (batch[1] >= 0).to(batch[0].dtype)
    return (model(batch[0]).squeeze(1) * mask).sum() / mask.sum()


def weighted_step(rank, ddp, compiled):
    """Gradients of 1, 1, 1 on rank 0 and 9 on rank 1; none elsewhere, nor in one micro-batch."""
    model = one_weight(0.0)
    values = {0: [1.0, 1.0, 1.0], 1: [9.0]}.get(rank, [5.0, 5.0])
    y = torch.full((len(values),), 1 if rank < 2 else -1)
    batches = [(torch.tensor(values, dtype=torch.float64)[:, None], y)]
    batches.insert(rank % 2, (torch.full((2, 1), 7.0, dtype=torch.float64), torch.tensor([-1, -1])))
    result = accumulate_step(ddp(nn.Sequential(model), compiled), batches, masked_output,
                             torch.optim.SGD(model.parameters(), lr=1.0), count=targets_of)
    return -model.weight.item(), result.count, math.isfinite(result.loss)


def nothing_anywhere(ddp):
    model, x = mlp(), torch.ones(2, 3, dtype=torch.float64)
    try:
        accumulate_step(ddp(model), [(x, torch.tensor([-1, -1]))], masked_output,
                        SGD(model.parameters()), count=targets_of)
    except ValueError as error:
        return str(error)


def count_reduces(ddp, group, compiled):
    """All-reduces of the gradients in windows of 3, 3 and 1 micro-batches, of ragged sizes."""
    calls, model = [], ddp(mlp(), compiled)

    def hook(state, bucket):
        calls.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(
            lambda future: future.value()[0] / dist.get_world_size(group))

    model.register_comm_hook(None, hook)
    train_epoch(model, micro_batches([4, 3, 2, 4, 1, 5, 2]), mse, SGD(model.parameters()), accum=3)
    return len(calls)


def evaluate_shard(ddp, rank, world, n):
    torch.manual_seed(0)
    model = ddp(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    data = TensorDataset(torch.arange(3.0 * n).view(n, 3).sin(), torch.arange(n) % 4)
    return evaluate(model, make_loader(data, 2, sampler=range(rank, n, world)))


def trained_buffers(ddp, rank):
    """BatchNorm's statistics after ranks trained on different data and then evaluated."""
    model = ddp(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(rank)), torch.arange(6) % 2
    train_epoch(model, [(x, y)], cross_entropy, SGD(model.parameters()))
    evaluate(model, [(x, y)])
    return model.module[0].running_mean


NINE = TensorDataset(torch.randn(10, 3, dtype=torch.float64,
                                 generator=torch.Generator().manual_seed(1)),
                     torch.randn(10, 1, dtype=torch.float64,
                                 generator=torch.Generator().manual_seed(2)))


def train_shard(ddp, rank, world):
    """Three epochs of 10 samples in batches of 2."""
    torch.manual_seed(0)
    model = ddp(mlp())
    optimizer, loader = SGD(model.parameters()), make_loader(
        NINE, 2, sampler=Shuffle(NINE, world, rank, seed=5))
    losses = [train_epoch(model, loader, mse, optimizer, accum=2).loss for _ in range(3)]
    return losses, [p.detach() for p in model.parameters()]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of 2 and of 3 ranks saw, in one spawn."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(in_rank, (store.port, folder), nprocs=3)
    return {n: [torch.load(os.path.join(folder, f"{n}.{rank}")) for rank in range(n)]
            for n in (2, 3)}


@each("world", [2, 3])
def test_ranks_with_unequal_targets_give_the_gradient_of_the_mean_over_all(ranks, world):  # D1 D10
    for rank, seen in enumerate(ranks[world]):
        for gradient, count, finite in seen["weighted"]:
            assert gradient == pytest.approx(3.0, abs=1e-12) and finite
            assert count == (3, 1, 0)[rank]
        assert "no target" in seen["empty"]


@each("world", [2, 3])
def test_each_window_has_one_gradient_all_reduce(ranks, world):  # D2 D10
    assert all(seen["reduces"] == [3, 3] for seen in ranks[world])


def test_a_model_compiled_in_place_under_ddp_makes_a_bounded_number_of_graphs(ranks):  # D10
    assert all(1 <= seen["graphs"] <= 8 for seen in ranks[2])


def test_what_rank_0_finds_or_raises_reaches_every_rank(ranks):
    assert all(seen["told"] == ("bad", 0) for seen in ranks[3])


@each("n", [5, 1])
def test_evaluation_on_ranks_is_that_of_one_process_without_padding(ranks, n):  # D3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x, y = torch.arange(3.0 * n).view(n, 3).sin(), torch.arange(n) % 4
    loss, accuracy, count = evaluate(model, [(x, y)])
    for seen in (*ranks[2], *ranks[3]):
        assert seen["evaluated"][n == 1] == (pytest.approx(loss), accuracy, n) and count == n


def test_evaluating_makes_the_buffers_of_all_ranks_agree(ranks):
    for seen in ranks.values():
        assert all(torch.equal(s["buffers"], seen[0]["buffers"]) for s in seen)
        assert seen[0]["buffers"].abs().sum() > 0


@each("world", [1, 2, 3])
def test_n_ranks_train_as_one_process_on_the_global_batch(ranks, world):  # D9
    torch.manual_seed(0)
    model, order = mlp(), Shuffle(NINE, seed=5)
    optimizer, losses = SGD(model.parameters()), []
    for _ in range(3):
        loader = make_loader(NINE, 2 * world, sampler=list(order)[:10 - 10 % world])
        losses.append(train_epoch(model, loader, mse, optimizer, accum=2).loss)
    for seen in ranks.get(world, []):
        assert seen["trained"][0] == pytest.approx(losses, abs=1e-6)
        assert all(map(close, seen["trained"][1], model.parameters()))


def ddp_job(*flags, start=(sys.executable,), env=(), **popen):
    """Starts ptspeed_ddp.py on the tiny job."""
    return subprocess.Popen([*start, "ptspeed_ddp.py", *TINY, *map(str, flags)], cwd=HERE,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **dict(env)}, **popen)


def finish(process):
    """Its exit status and output; the ranks hold its pipes too, so that none is left then."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out.splitlines(), err


class Faulty(torch.utils.data.Dataset):
    """Fails in rank 1 as the environment says, once training has begun."""
    classes = "ab"

    def __len__(self):
        return 45

    def __getitem__(self, i):
        if dist.is_initialized():
            if dist.get_rank() == 1 and i > 1:  # not when the model is checked
                {"raises": raises, "killed": killed, "leaves": sys.exit, "exits": exits, "": int,
                 "interrupted": interrupted, "waits": waits, "dies once": dies_once}[
                     os.environ["FAULT"]]()
        return tiny_data()[0][i]


def raises():
    raise ValueError("the fault")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_once():
    """In the second epoch of a job that restarts."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.path.exists(os.environ["FILE"]):
        killed()


def exits():
    os._exit(0)


def interrupted():
    raise KeyboardInterrupt


def waits():
    print("waiting", flush=True)
    threading.Event().wait(60)


def faulty_data():
    return Faulty(), tiny_data()[1]


@each("fault, word", [("raises", "ValueError: the fault"), ("killed", "SIGKILL"),
                      ("leaves", "left early"), ("exits", "left early"),
                      ("interrupted", "left early")])
def test_a_rank_that_fails_ends_the_job_and_is_named(job, monkeypatch, fault, word):  # D5
    monkeypatch.setenv("FAULT", fault)
    status, out, err = job(*TINY, "--world", 2, "--data", "test_ptspeed:faulty_data",
                           "--workers", 0, main=ptspeed_ddp.main)
    assert status == 1 and "rank 1" in err[-1] and not any("rank 0" in line for line in err)
    assert any(word in line for line in err) and not mp.active_children()


@pytest.mark.skipif(os.name == "nt", reason="has no such signals")
@each("sent, ignored, status", [(signal.SIGINT, False, 130), (signal.SIGTERM, True, -15),
                                (signal.SIGKILL, True, -9)])
def test_nothing_is_left_when_the_parent_is_stopped(sent, ignored, status):
    process = ddp_job("--world", 2, "--data", "test_ptspeed:faulty_data", "--workers", 0,
                      env={"FAULT": "waits"}, preexec_fn=lambda: signal.signal(  # as scripts do
                          signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler))
    assert "waiting\n" in process.stdout
    process.send_signal(sent)
    ended, out, err = finish(process)
    assert ended == status and err.count("\n") == (sent == signal.SIGINT), err


def test_two_jobs_at_once_finish_and_files_move_between_worlds(job, tmp_path):  # D4 K4
    with socket.socket() as taken:
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", 29500))
        here, there = tmp_path / "written by one process", tmp_path / "written by ranks"
        job(*TINY, "--checkpoint", here, "--epochs", 2)
        one = ddp_job("--world", 2, "--checkpoint", there, "--epochs", 2, "--batch-size", 4)
        two = ddp_job("--world", 2, "--checkpoint", here, "--json")
        results = [finish(process) for process in (one, two)]
    assert [(status, err) for status, out, err in results] == [(0, "")] * 2
    summary = json.loads(results[1][1][-1])
    assert (summary["world"], summary["global_batch"]) == (2, 16)
    assert sum(line.startswith("epoch") for line in results[1][1]) == 1  # the third of three
    status, out, err = job(*TINY, "--checkpoint", there, "--json")
    assert (status, err) == (0, []) and sum(line.startswith("epoch") for line in out) == 1


def test_torchrun_starts_the_ranks_and_its_world_wins():  # D8
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    status, out, err = finish(ddp_job("--json", start=start))
    assert status == 0 and json.loads(out[-1])["world"] == 2


def test_a_rank_that_torchrun_restarts_goes_on_from_the_checkpoint(job, tmp_path, monkeypatch):
    flags = ["--data", "test_ptspeed:faulty_data", "--workers", 0, "--checkpoint"]
    monkeypatch.setenv("FAULT", "")
    job(*TINY, "--world", 2, *flags, tmp_path / "undisturbed", main=ptspeed_ddp.main)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "--max-restarts", "2"]
    file = tmp_path / "restarted"
    status, out, err = finish(ddp_job(*flags, file, start=start,
                                      env={"FAULT": "dies once", "FILE": str(file)}))
    assert status == 0 and [line[:9] for line in out if line.startswith("epoch")] == [
        "epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert same(*(torch.load(tmp_path / name, weights_only=True) for name in os.listdir(tmp_path)))


@each("env, words", [
    ({"RANK": "x", "WORLD_SIZE": "1"}, ["'x'"]), ({"RANK": "2", "WORLD_SIZE": "2"}, ["2 of 2"]),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, ["-1 of 2"]),
    ({"RANK": "0", "WORLD_SIZE": "1"}, ["MASTER_ADDR expected"]),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "y"}, ["'y'"]),
    ({"LOCAL_RANK": "1"}, ["--epochs"]),  # by hand: no other rank tells it
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, [])], ids=str)
def test_a_wrong_environment_is_told_once_in_one_line(job, monkeypatch, env, words):
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ended, out, err = job(*TINY, "--epochs", 0 if "LOCAL_RANK" in env else 1, main=ptspeed_ddp.main)
    assert (ended, len(err)) == (2, len(words)) and all(word in err[0] for word in words), err


def test_another_world_than_torchruns_is_an_error(job, monkeypatch):  # D8
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, out, err = job(*TINY, "--world", 4, main=ptspeed_ddp.main)
    assert (status, len(err)) == (2, 1) and "4" in err[0] and "2" in err[0]


@each("flags, gpus, words", [
    ("--world 8", 1, ["8", "1", "--world 1", "--device cpu"]), ("--world 0", 0, ["--world"]),
    ("--world x", 0, ["--world"]), ("--backend nccl", 0, ["gloo"]), ("--compare", 0, ["--compare"]),
    ("--backend nccl --device cpu", 4, ["gloo"]), ("--parallel dp", 0, ["--parallel"]),
    ("--device cuda", 0, ["cuda"]), ("--device cuda:1", 2, ["cuda:1"]),
    ("--model test_ptspeed:absent", 0, ["absent"]), ("--checkpoint /nowhere/f", 0, ["/nowhere"]),
    ("--world 46", 0, ["45", "46"])])
def test_what_ranks_cannot_do_is_one_line_before_any_starts(
        job, monkeypatch, flags, gpus, words):  # D6 D7
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(ptspeed_ddp.mp, "spawn", None)
    status, out, err = job(*TINY, *flags.split(), main=ptspeed_ddp.main)
    assert (status, len(err)) == (2, 1) and all(word in err[0] for word in words)
    assert err[0].startswith("ptspeed_ddp.py: ")
