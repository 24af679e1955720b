"""te.h beside PyTorch on one machine, in one call. Needs torch with a GPU, and build/te_bench.

    beside_torch.py attention [WORD ...]   te_bench's attention, beside scaled_dot_product_attention over cuDNN before and after it; WORD: forward or
                                           backward alone, and shapes whose names have one

Figures are TFLOP/s: 4 b h s^2 d forward, half of it under a causal mask, and 2.5 times that backward. Flushed: single runs, the L2 cache swept before each,
the median. Sustained: runs back to back for 40 ms and more, when power holds the clocks down. PyTorch's are between CUDA events and contain its launches.
"""
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BUILD = os.environ.get("BUILD", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "build"))

# batch, heads, groups, sequence, head size, causal: those of te_bench
ATTENTION = [
    (4, 32, 8, 4096, 128, True), (4, 32, 32, 4096, 128, True), (1, 32, 8, 8192, 128, True), (1, 32, 8, 16384, 128, True),
    (16, 32, 8, 1024, 128, True), (1, 32, 8, 2048, 128, True),
    (4, 32, 8, 4096, 128, False), (4, 32, 32, 4096, 128, False), (1, 32, 8, 8192, 128, False), (2, 32, 8, 8192, 128, False),
    (1, 32, 8, 16384, 128, False), (16, 32, 8, 1024, 128, False),
    (4, 32, 8, 4096, 64, True), (4, 32, 32, 4096, 64, True), (1, 32, 8, 8192, 64, True), (4, 32, 8, 4096, 64, False),
    (1, 32, 8, 8192, 64, False),
    (4, 32, 32, 4096, 96, True), (4, 32, 8, 4096, 96, True), (4, 16, 16, 4096, 192, True), (4, 16, 4, 4096, 192, True),
    (4, 16, 16, 4096, 256, True), (4, 16, 2, 4096, 256, True),
]
WAYS = ("forward", "backward")


def label(shape):
    batch, heads, groups, s, d, causal = shape
    return "b%d h%d/%d s%d d%d%s" % (batch, heads, groups, s, d, " c" if causal else "")


def flushed(function, sweep, runs=12):
    """Median of milliseconds."""
    times = []
    for _ in range(runs):
        start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        sweep.zero_()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def sustained(function, once):
    runs = int(40 / once) + 4
    start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for i in range(-(runs // 2), runs):
        if i == 0:
            start.record()
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / runs


def sdpa(shapes, ways):
    """{(shape, way, kind): TFLOP/s} of cuDNN; a shape that it refuses is missing."""
    figures, sweep = {}, torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    for shape in shapes:
        batch, heads, groups, s, d, causal = shape
        flops = 4e-9 * batch * heads * s * s * d * (0.5 if causal else 1)
        q, k, v = [torch.randn(batch, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for h in (heads, groups, groups)]
        do = torch.randn(batch, s, heads, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            def forward():
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != groups)
            try:
                o = forward()
                functions = {"forward": forward, "backward": lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)}
                for way in ways:
                    for _ in range(3):
                        functions[way]()
                    time.sleep(0.04)
                    once = flushed(functions[way], sweep)
                    work = flops * (2.5 if way == "backward" else 1)
                    figures[label(shape), way, "flushed"] = work / once
                    figures[label(shape), way, "sustained"] = work / sustained(functions[way], once)
            except RuntimeError:
                torch.cuda.synchronize()
        del q, k, v, do
    return figures


def te_bench(words):
    """The same of te.h, by one run of te_bench. It takes a row for its shape or for its way."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "attention.csv")
        subprocess.run([os.path.join(BUILD, "te_bench"), "--csv", path, *words], check=True, stdout=subprocess.DEVNULL)
        with open(path) as f:
            rows = [r for r in csv.reader(f) if len(r) > 3 and r[0].startswith("attention ")]
    figures = {}
    for what, shape, _, rate, *_ in rows:
        way, _, kind = what[len("attention "):].partition(", ")
        figures[shape, way, kind or "flushed"] = float(rate)
    return figures


def attention(words):
    ways = [x for x in WAYS if x in words] or WAYS
    words = [x for x in words if x not in WAYS]
    shapes = [x for x in ATTENTION if not words or any(w in label(x) for w in words)]
    before = sdpa(shapes, ways)
    ours = te_bench([label(x) for x in shapes] if words else ["attention " + x for x in ways])
    after = sdpa(shapes, ways)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), time.strftime("%Y-%m-%d"))
    print("%-26s %-9s %30s   %30s" % ("TFLOP/s", "", "flushed: te.h  cuDNN  ratio", "sustained: te.h  cuDNN  ratio"))
    for shape in shapes:
        for way in ways:
            text = ""
            for kind in ("flushed", "sustained"):
                key = (label(shape), way, kind)
                mine, theirs = ours.get(key), [x[key] for x in (before, after) if key in x]
                cudnn = statistics.median(theirs) if theirs else None
                text += "%17s %6s %6s   " % ("%.0f" % mine if mine else "-", "%.0f" % cudnn if cudnn else "-", "%.2f" % (mine / cudnn) if mine and cudnn else "-")
            print("%-26s %-9s %s" % (label(shape), way, text))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] != "attention":
        sys.exit(__doc__)
    attention(sys.argv[2:])
