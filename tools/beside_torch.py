"""te.h beside PyTorch on one machine, in one call. Needs torch with a GPU, and build/te_bench.

    beside_torch.py attention [WORD ...]   te_bench's attention, beside scaled_dot_product_attention over cuDNN before and after it; WORD: forward or
                                           backward alone, and shapes whose names have one
    beside_torch.py train [RECIPE ...]     a training step of a random Llama of 1.24 G parameters, one sequence of 4096, AdamW, beside transformers and
                                           torch.compile in bf16; RECIPE: those of build/llama, else all
    beside_torch.py decode [RECIPE ...]    one id after 512, beside transformers with a static cache, compiled, and a dynamic one
    beside_torch.py batches [RECIPE ...]   one id of each of 8 sequences, and of 32, after 512, and the first id after 8192, beside the same; RECIPE: else none
                                           and current; WORD, one of b8, b32, prefill: that alone
    --csv FILE: the attention's rows as those of tests/bench/h200.csv
    --large: a model of 8.03 G parameters, for decode and batches; --small: one of a few layers, to try the tool
    --device cpu: on the CPU, without torch.compile

Attention: TFLOP/s, 4 b h s^2 d forward, half of it under a causal mask, and 2.5 times that backward. Flushed: single runs, the L2 cache swept before each,
the median. Sustained: runs back to back for 40 ms and more, when power holds the clocks down. PyTorch's are between CUDA events and contain its launches.
Steps and ids: milliseconds by the host's clock, each waited for, the median of those behind the first five. te.h keeps f32 states and masters, torch bf16 states.
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

DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cuda"
SMALL, LARGE = "--small" in sys.argv, "--large" in sys.argv
CSV = sys.argv[sys.argv.index("--csv") + 1] if "--csv" in sys.argv else None
RECIPES = ["none", "delayed", "current", "block", "mxfp8", "nvfp4"]
SKIPPED = 5  # steps, or ids, that compile and warm up
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


def flops(shape, way):
    batch, heads, _, s, d, causal = shape
    return 4 * batch * heads * s * s * d * (0.5 if causal else 1) * (2.5 if way == "backward" else 1)


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
                    work = flops(shape, way) * 1e-9
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
    rows = []
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), time.strftime("%Y-%m-%d"))
    print("%-26s %-9s %30s   %30s" % ("TFLOP/s", "", "flushed: te.h  cuDNN  ratio", "sustained: te.h  cuDNN  ratio"))
    for shape in shapes:
        for way in ways:
            text = ""
            for kind in ("flushed", "sustained"):
                key = (label(shape), way, kind)
                mine, theirs = ours.get(key), [x[key] for x in (before, after) if key in x]
                cudnn = statistics.median(theirs) if theirs else None
                if mine:
                    name = "attention " + way + ("" if kind == "flushed" else ", sustained")
                    compared = ["cuDNN", "%.4g" % cudnn, "%.3f" % (mine / cudnn)] if cudnn else ["", "", ""]
                    rows.append([name, label(shape), "%.3f" % (flops(shape, way) / mine * 1e-6), "%.4g" % mine, "TFLOP/s", *compared])
                text += "%17s %6s %6s   " % ("%.0f" % mine if mine else "-", "%.0f" % cudnn if cudnn else "-", "%.2f" % (mine / cudnn) if mine and cudnn else "-")
            print("%-26s %-9s %s" % (label(shape), way, text))
    if CSV:
        with open(CSV, "w") as f:
            csv.writer(f, lineterminator="\n").writerows(rows)


# ---- a whole model ----

SIZES = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8)
if LARGE:
    SIZES.update(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
if SMALL:
    SIZES.update(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TRAINED, PROMPT, LONG = (64, 16, 48) if SMALL else (4096, 512, 8192)  # lengths of sequences: for a step, to continue, of a prefill
DECODED, PREFILLED = SKIPPED + 40, SKIPPED + 7


def random_llama(folder):
    """Writes a Llama's folder, and returns the model. It is made on the device, in bf16: in f32, on the CPU, a large one takes minutes."""
    import transformers
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=2 * LONG, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="4GB")
    return model.eval()


def random_ids(folder, count, length):
    """A file of sequences, and the same on the device."""
    ids = torch.randint(SIZES["vocab_size"], (count, length))
    path = os.path.join(folder, "%dx%d.txt" % (count, length))
    with open(path, "w") as f:
        f.writelines(" ".join(map(str, line)) + "\n" for line in ids.tolist())
    return path, ids.to(DEVICE)


def median(times):
    return statistics.median(times[SKIPPED:])


def llama(folder, recipe, *options):
    """Median milliseconds of build/llama's steps or ids."""
    command = [os.path.join(BUILD, "llama"), folder, "--times", "--recipe", recipe, *options] + (["--device", DEVICE] if DEVICE != "cuda" else [])
    lines = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True).stderr.splitlines()
    return median([float(x[3:]) for x in lines if x.startswith("ms ")])


def llama_decodes(folder, recipe, path, batch, count):
    """Of ids that continue `batch` sequences of a file at a time."""
    stored = ["--quantized-weights"] if recipe != "none" else []
    return llama(folder, recipe, "--ids", path, "--batch", str(batch), "--generate", str(count), *stored)


def clocked(function):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def torch_step(folder, ids, compiled):
    import transformers
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(DEVICE)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    forward = torch.compile(model) if compiled else model

    def step():
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
    return median([clocked(step) for _ in range(SKIPPED + 12)])


@torch.no_grad()
def torch_decode(model, ids, static):
    import transformers
    cache = transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + DECODED + 1) if static else transformers.DynamicCache(config=model.config)
    forward = torch.compile(model, mode="reduce-overhead", fullgraph=True) if static and DEVICE == "cuda" else model
    state = dict(position=ids.shape[1], ids=model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1))

    def one():
        position = torch.tensor([state["position"]], device=DEVICE)
        logits = forward(input_ids=state["ids"].clone(), past_key_values=cache, cache_position=position, position_ids=position[None], use_cache=True).logits
        state.update(position=state["position"] + 1, ids=logits[:, -1:].argmax(-1).clone())
    times = [clocked(one) for _ in range(DECODED)]
    torch.compiler.reset()  # a model compiled for one batch is compiled again for another, with sizes that may vary
    return median(times)


@torch.no_grad()
def torch_prefill(model, ids, compiled):
    """With a cache of its own for each sequence, of which one has been compiled for already."""
    import transformers
    forward = torch.compile(model) if compiled else model

    def one():
        cache = transformers.DynamicCache(config=model.config)
        forward(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    times = [clocked(one) for _ in range(PREFILLED)]
    torch.compiler.reset()
    return median(times)


def table(what, unit, rows):
    best = min(ms for name, ms in rows if not name.startswith("te.h"))
    print("%-36s %10s %12s %22s" % (what, "ms", "ids/s", "speed, torch's best 1"))
    for name, ms in rows:
        print("%-36s %10.2f %12.0f %22.2f" % (name, ms, unit / ms * 1e3, best / ms), flush=True)


def named(recipe):
    return "te.h, " + ("bf16" if recipe == "none" else recipe)


def train(folder, recipes):
    path, ids = random_ids(folder, 1, TRAINED)
    options = ["--train", path, "--steps", str(SKIPPED + 12), "--out", os.path.join(folder, "out")]
    rows = [(named(r), llama(folder, r, *options)) for r in recipes]
    rows.append(("transformers, sdpa, bf16", torch_step(folder, ids, False)))
    if DEVICE == "cuda":
        rows.append(("the same, torch.compile", torch_step(folder, ids, True)))
    table("a training step", TRAINED, rows)


def decode(folder, model, recipes, batch):
    path, ids = random_ids(folder, batch, PROMPT)
    rows = [(named(r), llama_decodes(folder, r, path, batch, DECODED)) for r in recipes]
    if batch == 1:
        rows.append(("transformers, dynamic cache, bf16", torch_decode(model, ids, False)))
    rows.append(("transformers, static cache%s" % (", compiled" if DEVICE == "cuda" else ""), torch_decode(model, ids, True)))
    table("an id after %d%s" % (PROMPT, ", batch %d" % batch if batch > 1 else ""), batch, rows)


def prefill(folder, model, recipes):
    path, ids = random_ids(folder, PREFILLED, LONG)
    rows = [(named(r), llama_decodes(folder, r, path, 1, 1)) for r in recipes]
    rows.append(("transformers, sdpa, bf16", torch_prefill(model, ids[:1], False)))
    if DEVICE == "cuda":
        rows.append(("the same, torch.compile", torch_prefill(model, ids[:1], True)))
    table("the first id after %d" % LONG, LONG, rows)


def models(what, words):
    recipes = [x for x in words if x in RECIPES] or (["none", "current"] if what == "batches" else RECIPES)
    with tempfile.TemporaryDirectory() as folder:
        model = random_llama(folder)
        count = sum(p.numel() for p in model.parameters())
        print(torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", "torch", torch.__version__, time.strftime("%Y-%m-%d"), "%.2f G parameters" % (count / 1e9))
        if what == "train":
            del model
            train(folder, recipes)
        elif what == "decode":
            decode(folder, model, recipes, 1)
        else:
            forms = [x for x in words if x in ("b8", "b32", "prefill")] or ["b8", "b32", "prefill"]
            for batch in (8, 32):
                if "b%d" % batch in forms:
                    decode(folder, model, recipes, batch)
            if "prefill" in forms:
                prefill(folder, model, recipes)


if __name__ == "__main__":
    words = [x for i, x in enumerate(sys.argv[2:]) if not x.startswith("--") and sys.argv[1 + i] not in ("--device", "--csv")]
    if len(sys.argv) < 2 or sys.argv[1] not in ("attention", "train", "decode", "batches"):
        sys.exit(__doc__)
    if sys.argv[1] == "attention":
        attention(words)
    else:
        models(sys.argv[1], words)
