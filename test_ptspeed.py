# SPDX-License-Identifier: MIT
"""The proofs of ptspeed: a test's name is the claim, the comment on its line is its case's id."""
import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import os
import sys
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import (BatchSampler, DataLoader, IterableDataset, Subset, TensorDataset,
                              default_collate, get_worker_info)

import ptspeed
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
    (ROWS, {"batch_sampler": [[0, 1], [4]], "batch_size": 1})])
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
    ("0::/../../host/pod", {"": 400000}, 1, 4), ("4:cpu,cpuacct:/", {"cpu": -1}, 1, 64),
    ("4:cpu,cpuacct:/d/x", {"cpu,cpuacct/d": 500000, "cpu,cpuacct/d/x": -1}, 1, 5),
    ("4:cpuset:/d\n2:cpu:/", {"cpuset/d": 100000}, 1, 64), ("4:cpu:/host", {"cpu": 250000}, 1, 2),
    ("4:cpu:/d\n0::/s", {"cpu/d": 600000, "unified/s": "max"}, 1, 6),
    ("1:name=systemd:/d\n0::/s", {"unified/s": 700000}, 1, 7)])
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
        self.recovered()
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
                      (RuntimeError, "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")])
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
    model, batches = mlp(), micro_batches(sizes)
    oracle = copy.deepcopy(model)
    optimizer, textbook = SGD(model.parameters()), SGD(oracle.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1)
    for _ in range(2):  # the second epoch would show what the first one left behind
        result = train_epoch(model, iter(batches), mse, optimizer, accum=accum, scheduler=scheduler)
        for i in range(0, len(sizes), accum):
            oracle_step(oracle, concatenated(batches[i:i + accum]), mse, textbook)
    assert close(model, oracle) and all(p.grad is None for p in model.parameters())
    assert (result.steps, result.samples) == (scheduler.last_epoch / 2, sum(sizes))
    assert result.steps == math.ceil(len(sizes) / accum)


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
    assert to_gpu(t, "cpu") is t is to_gpu(batch, torch.device("cpu"))["x"][0]  # no copy


@each("make, get", [
    (lambda t: Pair(t, "a"), lambda o: o.x), (Frozen, lambda o: o.x), (Slots, lambda o: o.x),
    (FrozenSlots, lambda o: o.x), (lambda t: Output(x=t), lambda o: o["x"]),
    (lambda t: collections.OrderedDict(b=t, a=1), lambda o: o["b"]),
    (lambda t: collections.defaultdict(list, x=t), lambda o: o["x"]),
    (lambda t: collections.UserDict(x=t), lambda o: o["x"]),
    (lambda t: nn.utils.rnn.pack_sequence([t]), lambda o: o.data),
    (lambda t: torch.max(t[None], 1), lambda o: o.indices)])
def test_each_kind_of_container_keeps_its_type_and_its_original(make, get):  # T2
    made = make(torch.ones(3))
    moved = to_gpu(made, "meta")
    assert type(moved) is type(made) and get(moved).device.type == "meta"
    assert get(made).device.type == "cpu"
    assert getattr(moved, "default_factory", 0) == getattr(made, "default_factory", 0)
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
    (Pair(torch.ones(7), "a"), 7), (([torch.ones(3, 8, 8)] * 7, torch.ones(7)), None), ({}, None), ((torch.tensor(7), 1), None),
    ((), None), (7, None), ("batch", None), (None, None)])
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
@each("wrap", [lambda *y: y, lambda a, b: {"a": a, "b": b}, Pair], ids=["tuple", "dict", "named"])
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
