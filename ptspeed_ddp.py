# SPDX-License-Identifier: MIT
"""ptspeed_ddp: technique 9, DistributedDataParallel (DDP), one process per device.

    python ptspeed_ddp.py --world 8                                   # one host
    torchrun --standalone --nproc-per-node 8 ptspeed_ddp.py           # the same, by torchrun
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29400 --rdzv-id job1 ptspeed_ddp.py      # on each of two hosts

Why: no copying of the model in every step and no shared Python lock, as in DataParallel; gradients
    are averaged while the backward pass still runs. The result equals that of one process with the
    global batch. `grep "# DDP:"` shows all that it adds to the job of ptspeed.py.
Limits: BatchNorm sees each rank's micro-batch. Every rank runs the same number of windows.
Source: Li et al. 2020, arXiv 2006.15704; PyTorch DDP and torchrun notes.
"""
import gc
import json
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import ptspeed

PROG = "ptspeed_ddp.py"
ENVIRONMENT = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be as torchrun sets them"


def parse_args(argv):
    """The flags of ptspeed.py but for --parallel and --compare, and two more."""
    p = ptspeed.make_parser(PROG)
    p.add_argument("--world", type=ptspeed.number(int, 1), help="processes, one per device"
                   " (default: the GPUs of this host, or 2 on a CPU; torchrun's when it starts us)")
    p.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl on CUDA, else gloo")
    return p.parse_args(argv)


def check_world(args, world, local_world):
    """Fills in device and backend; tells what cannot work before any process starts."""
    gpus = torch.cuda.device_count()
    if args.device not in (None, "cpu", "cuda"):
        raise ptspeed.BadInput(f"--device {args.device}: each rank has a device of its own, so cpu"
                               " or cuda")
    args.device = args.device or ("cuda" if gpus else "cpu")
    if args.device == "cuda" and local_world > gpus:
        raise ptspeed.BadInput(f"{local_world} ranks on this host need as many GPUs, and it has"
                               f" {gpus}: use --world {max(1, gpus)}, or --device cpu")
    args.backend = args.backend or ("nccl" if args.device == "cuda" else "gloo")
    if args.backend == "nccl" and args.device != "cuda":
        raise ptspeed.BadInput("--backend nccl needs GPUs: use --backend gloo on a CPU")
    if args.world not in (None, world):
        raise ptspeed.BadInput(f"--world {args.world} under torchrun, which started {world} ranks:"
                               " leave it out")


def train(args, rank, world, local_rank, local_world, store):
    """The job of one rank; returns the summary."""
    data = ptspeed.load_data(args) if local_rank == 0 else None     # DDP: one fetch per host
    device = None
    if args.device == "cuda":                                       # DDP: device of its own
        args.device = f"cuda:{local_rank}"
        device = torch.device(args.device)
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:                       # DDP: or a share of the cores
        torch.set_num_threads(ptspeed.usable_cpus(local_world))
    dist.init_process_group(args.backend, store=store, rank=rank,   # DDP: process group
                            world_size=world, device_id=device)
    args.data = ptspeed.from_rank_0(lambda: data.name)              # DDP: one data set for all
    dist.barrier()                                                  # DDP: every host has it now
    if data is None or data.name != args.data:
        data = ptspeed.load_data(args)
    # run() gives each rank its share of the samples (DDP: sampler), calls set_epoch, and prints
    # and saves on rank 0 alone: the same lines serve the single process, where world is 1.
    summary = ptspeed.run(args, data, rank=rank, world=world, wrap=wrap, backend=f" {args.backend}")
    dist.destroy_process_group()                                    # DDP: shutdown
    gc.collect()  # frees the group, whose threads must end before Python does (pytorch#179291)
    return summary


def torchrun_store():
    """torchrun's own store, set apart in each restart, which torch omits (pytorch#135712)."""
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except (RuntimeError, ValueError) as error:
        raise ptspeed.BadInput(f"{ENVIRONMENT}: {' '.join(str(error).split())[:200]}")
    single = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"  # else agents count restarts apart
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if single else "any"
    return dist.PrefixStore(f"restart {restart}", store)


def wrap(model):
    """Averages the gradients of all ranks while the backward pass goes on."""
    model = DistributedDataParallel(model)                          # DDP: wrap
    model.broadcast_buffers = False  # evaluate() does it once an epoch, not once a window
    return model


def spawned(rank, args, world, port, parent, began):
    """A rank that mp.spawn started: reports to the parent's store that it is done or why not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # DDP: spawn's death signal, ignored in scripts'
    if os.getppid() != parent:                    # background jobs; the parent may be gone already
        os._exit(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    # loader workers start in the system's way again, not in the slow one of mp.spawn
    mp.set_start_method(mp.get_all_start_methods()[0], force=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, use_libuv=os.name != "nt")
    try:
        summary = train(args, rank, world, rank, world, store)
        if rank == 0:                                               # DDP: rank 0 speaks
            summary["seconds"] = time.time() - began
            print(ptspeed.report(args, summary), flush=True)
        store.set(f"done {rank}", "")
    except BaseException as error:  # SystemExit too, which spawn would call a success
        if store.add("failures", 1) == 1:  # the others fail only because this one did
            message, _ = ptspeed.explain(error)
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                message = f"left early with {error!r}"
            told = message and (isinstance(error, ptspeed.RunFailed) or error.__suppress_context__
                                or error.__context__ is None)
            trace = "" if told else traceback.format_exc()
            store.set("first", json.dumps([rank, message or repr(error), trace]))
        sys.stdout.flush()
        os._exit(1)


def launch(args, world):
    """Starts the ranks, and ends them all as soon as one has failed."""
    began, data = time.time(), ptspeed.load_data(args)  # chosen once, so that ranks cannot mix sets
    args.data = data.name
    ptspeed.load_checkpoint(args, data)
    check = ptspeed.changed(args, device="cpu", compile=False, batch_size=1)
    ptspeed.Job(check, data, world=world)
    # DDP: no fixed port, so that two jobs never meet: the system chooses one for the parent's store
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          use_libuv=os.name != "nt")  # of which Windows has none
    context = mp.spawn(spawned, (args, world, store.port, os.getpid(), began), nprocs=world,
                       join=False)                                  # DDP: spawn
    try:
        waiting = dict(enumerate(context.processes))
        while waiting:
            multiprocessing.connection.wait([p.sentinel for p in waiting.values()])
            for rank, process in list(waiting.items()):
                if process.exitcode is not None:
                    del waiting[rank]
                    if not store.check([f"done {rank}"]):
                        raise failure(store, context.processes, rank)
    finally:
        for end in ("terminate", "kill"):
            for process in context.processes:
                if process.is_alive():
                    getattr(process, end)()
            for process in context.processes:
                process.join(5)


def failure(store, processes, rank):
    """The RunFailed that names the rank that failed first; prints its traceback."""
    killed = [(r, p.exitcode) for r, p in enumerate(processes)
              if (p.exitcode or 0) < 0 and p.exitcode != -signal.SIGABRT]  # which NCCL does itself
    if killed:
        rank, code = killed[0]
        why = " (often because the host's memory ended)" if code == -signal.SIGKILL else ""
        return ptspeed.RunFailed(f"rank {rank} was killed by {signal.Signals(-code).name}{why}")
    # A rank that reports an error exits with 1, so one that exits with 0 and is not done just left.
    left = [r for r, p in enumerate(processes)
            if p.exitcode == 0 and not store.check([f"done {r}"])]
    if left or not store.check(["first"]):
        return ptspeed.RunFailed(f"rank {(left or [rank])[0]} left early, without an error")
    rank, message, trace = json.loads(store.get("first"))
    if trace:
        print(trace, file=sys.stderr, flush=True)
    return ptspeed.RunFailed(f"rank {rank}: {message}")


def main(argv=None):
    """Runs the job on several processes; exit statuses as in ptspeed.py."""
    began, env = time.perf_counter(), os.environ
    torchrun = "RANK" in env and "WORLD_SIZE" in env
    with ptspeed.told_in_one_line(PROG, quiet=torchrun and env.get("LOCAL_RANK", "0") != "0"):
        args = parse_args(argv)
        if torchrun:                                                # DDP: started by torchrun
            try:
                rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
                local_rank = int(env.get("LOCAL_RANK", 0))
                local_world = int(env.get("LOCAL_WORLD_SIZE", 1))
            except ValueError as error:
                raise ptspeed.BadInput(f"{ENVIRONMENT}: {error}")
            if not 0 <= rank < world:
                raise ptspeed.BadInput(f"{ENVIRONMENT}: rank {rank} of {world}")
            check_world(args, world, local_world)
            summary = train(args, rank, world, local_rank, local_world, torchrun_store())
            if rank == 0:
                summary["seconds"] = time.perf_counter() - began
                print(ptspeed.report(args, summary))
        else:
            world = args.world or torch.cuda.device_count() or 2
            check_world(args, world, world)
            launch(args, world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
