"""The same as te.h's figures of several GPUs, by PyTorch. tools/two_gpus.sh starts it in each rank, with the variables of torchrun.

    two_gpus.py bandwidth CSV    the messages of a CSV of te_info --ranks by torch.distributed: fills in what they are compared with
    two_gpus.py fsdp CSV         a training step of te_bench dist's model by FSDP2 (parameters in f32 shards, computed in bf16, gradients reduced in f32; AdamW, fused),
                                 beside the row of te.h in a CSV of te_bench dist
    two_gpus.py compiled CSV     the same with each layer by torch.compile
    --small: the sizes of te_bench dist --small

Without a GPU: over gloo, to try it.
"""
import csv
import ctypes
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

GPU, SMALL = torch.cuda.is_available(), "--small" in sys.argv
RANK, RANKS, LOCAL = (int(os.environ[x]) for x in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
DEVICE = torch.device("cuda", LOCAL % torch.cuda.device_count()) if GPU else torch.device("cpu")
FIELDS = ["what", "shape", "microseconds", "ours", "unit", "against", "theirs", "ratio"]
# vocabulary, hidden, inner, layers, heads, heads of keys, sequence: those of te_bench dist's model
MODEL = (64, 64, 128, 2, 4, 2, 32) if SMALL else (128256, 2048, 8192, 16, 32, 8, 4096)


def wait():
    if GPU:
        torch.cuda.synchronize()


def slowest(seconds):
    x = torch.tensor([seconds], device=DEVICE)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.item()


def time_of_ranks(run, runs):
    """Seconds of one of `runs` calls behind each other, on the rank that takes longest."""
    dist.barrier()
    wait()
    began = time.perf_counter()
    for _ in range(runs):
        run()
    wait()
    return slowest((time.perf_counter() - began) / runs)


def read(path):
    """The lines that are no rows, and the rows."""
    lines = open(path).read().splitlines()
    return [x for x in lines if x.startswith("#")], list(csv.DictReader(x for x in lines if not x.startswith("#")))


def write(path, comments, rows):
    with open(path, "w") as f:
        f.writelines(x + "\n" for x in comments)
        f.write(",".join(FIELDS) + "\n")
        for r in rows:
            f.write('"%s","%s",%s\n' % (r["what"], r["shape"], ",".join('"%s"' % r[x] if "," in (r[x] or "") else r[x] or "" for x in FIELDS[2:])))


def compare(row, name, theirs):
    row.update(against=name, theirs="%.4g" % theirs, ratio="%.3f" % (float(row["ours"]) / theirs))
    print("%-36s %-28s te.h %10s  %s %10.4g %s  ratio %s" % (row["what"], row["shape"], row["ours"], name, theirs, row["unit"], row["ratio"]), flush=True)


def bytes_of(shape):
    """Of "2 ranks 4 KiB"."""
    number, unit = shape.split()[-2:]
    return int(float(number) * {"B": 1, "KiB": 1024, "MiB": 1 << 20}[unit])


def exchange(what, n):
    """A call, and what the bus carries of the message."""
    kind, others = what.split()[0], (RANKS - 1) / RANKS
    dtype = torch.float32 if what.endswith("f32") else torch.uint8
    n //= dtype.itemsize
    whole, part = torch.zeros(n, dtype=dtype, device=DEVICE), torch.zeros(n // RANKS, dtype=dtype, device=DEVICE)
    other = torch.zeros_like(whole)

    def send():
        if RANK % 2 == 0 and RANK + 1 < RANKS:
            dist.send(whole, RANK + 1)
        elif RANK % 2 == 1:
            dist.recv(whole, RANK - 1)
    return {"all_reduce": (lambda: dist.all_reduce(whole), 2 * others), "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), others),
            "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), others), "broadcast": (lambda: dist.broadcast(whole, 0), 1),
            "all_to_all": (lambda: dist.all_to_all_single(other, whole), others), "send": (send, 1)}[kind]


def bandwidth(path):
    comments, rows = read(path)
    for row in rows:
        if not row["unit"].endswith("of the bus"):
            continue
        size = bytes_of(row["shape"])
        run, share = exchange(row["what"], size)
        try:
            for _ in range(4):
                run()
        except RuntimeError as e:  # gloo lacks some
            print("%s: left out: %s" % (row["what"], str(e).splitlines()[0]), flush=True)
            continue
        seconds = time_of_ranks(run, 20 if GPU else 2)
        compare(row, "torch.distributed", size / seconds * 1e-9 * share)
    if RANK == 0:
        write(path, comments, rows)


def fsdp(path, compiled):
    import transformers
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    vocabulary, hidden, inner, layers, heads, groups, length = MODEL
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                                      num_key_value_heads=groups, max_position_embeddings=2 * length, tie_word_embeddings=False, attn_implementation="sdpa",
                                      bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with DEVICE:
        model = transformers.LlamaForCausalLM(config)
    mesh = DeviceMesh(DEVICE.type, list(range(RANKS)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=GPU)
    ids = torch.randint(vocabulary, (1, length), device=DEVICE)

    def step():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
    for _ in range(4):
        step()
    seconds = statistics.median(time_of_ranks(step, 1) for _ in range(7))
    peak = torch.cuda.max_memory_allocated() / 1048576 if GPU else 0
    if RANK:
        return
    comments, rows = read(path)
    ours = next(r for r in rows if r["what"] == "training step, parameter shards")
    name = "torch FSDP2%s" % (", compiled" if compiled else "")
    rows.append(dict(ours, what="training step beside %s" % name))
    compare(rows[-1], name, RANKS * length / seconds)
    print("a step: %.1f ms; peak memory %.0f MiB" % (seconds * 1e3, peak), flush=True)
    write(path, comments, rows)


def nccl_version():
    """Of the library that is in use: torch.cuda.nccl.version() is the one that PyTorch was built with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return "%d.%d.%d" % (number.value // 10000, number.value // 100 % 100, number.value % 100)


def main(what, path):
    if GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if GPU else "gloo", device_id=DEVICE if GPU else None)
    if RANK == 0:
        print("torch %s, NCCL %s" % (torch.__version__, nccl_version() if GPU else "none"), flush=True)
    else:
        sys.stdout = open(os.devnull, "w")
    if what == "bandwidth":
        bandwidth(path)
    else:
        fsdp(path, what == "compiled")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("bandwidth", "fsdp", "compiled"):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
