"""Small random models of each family, made and run by transformers, against examples/llama.c.

    models.py LLAMA FOLDER [WORD...]     LLAMA: the program; FOLDER: for models and outputs; words choose cases by name

Tolerances are shares of the largest number of a tensor:
  f32   1e-4: both add up in f32, in other orders; gradients of four layers lose two more digits than that
  bf16  2e-2, or 1.5 times what transformers' own bf16 misses by: a number has 8 bits, and some thirty roundings lie between an id and a logit. The truth of both is
        f32 on weights rounded to bf16; the worst of some fifty tensors is as good as chance, on either side.
"""
import json
import os
import shutil
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(2)

SEQUENCES = [[3, 17, 42, 8, 90, 1, 55, 23, 11, 64, 7, 2], [5, 9, 77], list(range(30, 54))]
SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.5)
GEMMA3 = dict(full_attention=dict(rope_type="linear", rope_theta=100000.0, factor=8.0), sliding_attention=dict(rope_type="default", rope_theta=10000.0))

# name, config class, what differs from SIZES, the largest size of a file
CASES = [
    ("llama", "Llama", dict(), None),
    ("llama_rope_bias", "Llama", dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True), "40KB"),
    ("llama_linear", "Llama", dict(rope_parameters=LINEAR, num_key_value_heads=4, head_dim=24), None),
    ("mistral", "Mistral", dict(sliding_window=5, head_dim=16), None),
    ("qwen2", "Qwen2", dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1), None),
    ("qwen3", "Qwen3", dict(head_dim=24), "40KB"),
    ("gemma", "Gemma", dict(head_dim=16, num_key_value_heads=1), None),
    ("gemma2", "Gemma2", dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=20, attn_logit_softcapping=3.0, final_logit_softcapping=4.0), None),
    ("gemma3", "Gemma3", dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=20, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                              rope_parameters=GEMMA3), None),
    ("mixtral", "Mixtral", dict(num_local_experts=4, num_experts_per_tok=2), None),
    ("mixtral_many", "Mixtral", dict(num_local_experts=8, num_experts_per_tok=3, sliding_window=4), "60KB"),
]

failures = []


def check(name, fine, text):
    print(f"  {'ok  ' if fine else 'FAIL'} {name}: {text}", flush=True)
    if not fine:
        failures.append(name)


def decide(model, experts):
    """Makes routing robust: the first numbers of a hidden state are levels of the experts by the token alone, far enough from each other for bf16 and for steps of training. Else a
    rounding sends a token to another expert, and two correct programs differ."""
    table = model.model.embed_tokens.weight
    for token in range(table.shape[0]):
        table[token, :experts] = 0.4 * torch.randperm(experts).float()
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            p.mul_(0.02)[:, :experts].add_(torch.eye(experts))
        if name.endswith("post_attention_layernorm.weight"):
            p[:experts] = 1
        if name.endswith("o_proj.weight"):
            p[:experts] = 0
        if name.endswith("experts.down_proj"):
            p[:, :experts] = 0


def make(family, extra, folder, shard):
    config = getattr(transformers, family + ("TextConfig" if family == "Gemma3" else "Config"))(**{**SIZES, **extra})
    torch.manual_seed(7)
    model = getattr(transformers, family + "ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = "norm" in name and p.dim() == 1
            p.normal_(1.0 if norm and not family.startswith("Gemma") else 0.0, 0.2 if p.dim() == 1 else 1.0 if "gate.weight" in name else 0.15)
        if family == "Mixtral":
            decide(model, config.num_local_experts)
    model.save_pretrained(folder, **(dict(max_shard_size=shard) if shard else {}))


def load(folder, dtype):
    """In f32, of weights rounded to dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype).float())
    return model


def loss_of(model, ids):
    logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits, torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")


def reference(model):
    model.zero_grad()
    logits, loss = [], 0
    for ids in SEQUENCES:
        y, part = loss_of(model, ids)
        logits.append(y.detach())
        loss = loss + part
    loss = loss / sum(len(ids) - 1 for ids in SEQUENCES)
    loss.backward()
    return logits, loss.item()


def gradients(model):
    """By the names that a file has: transformers keeps the experts of a layer in two tensors."""
    grads = {}
    for name, p in model.named_parameters():
        g = torch.zeros_like(p).float() if p.grad is None else p.grad.float()
        if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            base = name.replace(".mlp.experts", ".block_sparse_moe.experts").rsplit(".", 1)[0]
            for e in range(g.shape[0]):
                if "down_proj" in name:
                    grads[f"{base}.{e}.w2.weight"] = g[e]
                else:
                    grads[f"{base}.{e}.w1.weight"], grads[f"{base}.{e}.w3.weight"] = g[e].chunk(2, 0)
        else:
            grads[name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight")] = g
    return grads


def run(*args):
    r = subprocess.run(args, capture_output=True, text=True)
    if r.returncode:
        failures.append(" ".join(args))
        print("  FAIL", " ".join(args), r.stderr.strip(), flush=True)
    return r.stdout


def error(got, want):
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def compare(llama, folder, out, name, dtype, tolerance):
    model = load(folder, torch.float32 if dtype == "f32" else torch.bfloat16)
    logits, loss = reference(model)
    want = gradients(model)
    allowed = dict.fromkeys(("loss", "logits", "gradients"), tolerance)
    if dtype == "bf16":
        model = load(folder, torch.bfloat16).to(torch.bfloat16)
        near, near_loss = reference(model)
        theirs = dict(loss=abs(near_loss - loss) / abs(loss), logits=max(map(error, near, logits)), gradients=max(error(g, want[k]) for k, g in gradients(model).items()))
        allowed = {k: max(tolerance, 1.5 * theirs[k]) for k in allowed}
    text = run(llama, folder, "--ids", out + ".ids", "--dtype", dtype, "--logits", out + ".logits", "--grads", out + ".grads")
    if not text.startswith("loss "):
        return
    got = float(text.split()[1])
    check(f"{name} {dtype} loss", abs(got - loss) <= allowed["loss"] * abs(loss), f"{got:.7g}, transformers {loss:.7g}")
    mine = load_file(out + ".logits")
    worst = max(error(mine[f"logits.{i}"], y) for i, y in enumerate(logits))
    check(f"{name} {dtype} logits", len(mine) == len(logits) and worst <= allowed["logits"], f"{worst:.2g} of the largest, {allowed['logits']:.2g} is allowed")
    mine = load_file(out + ".grads")
    check(f"{name} {dtype} names", set(mine) == set(want), f"{len(mine)} parameters {sorted(set(mine) ^ set(want))[:4]}")
    worst, where = max((error(mine[k], want[k]), k) for k in want if k in mine)
    check(f"{name} {dtype} gradients", worst <= allowed["gradients"], f"{worst:.2g} of the largest, {allowed['gradients']:.2g} is allowed, in {where}")


def continue_greedily(model, ids, n):
    ids = list(ids)
    for _ in range(n):
        ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    return ids[-n:]


def generate(llama, folder, out, name):
    common = [llama, folder, "--ids", out + ".ids", "--generate", "12", "--dtype"]
    model = load(folder, torch.float32)
    with torch.no_grad():
        want = [continue_greedily(model, ids, 12) for ids in SEQUENCES]
    for dtype in ("f32", "bf16"):
        cached, anew = run(*common, dtype), run(*common, dtype, "--no-cache")
        check(f"{name} {dtype} cache", cached == anew and cached, "the same ids with and without")
        if dtype == "f32":
            got = [[int(i) for i in line.split()] for line in cached.splitlines()]
            check(f"{name} continues", got == want, "the ids of transformers")


def train(llama, folder, out, name):
    """Four steps of AdamW here and there; a folder that transformers opens; --resume and --checkpoint change nothing."""
    model = load(folder, torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    want = []
    for step in range(4):
        ids = SEQUENCES[step % len(SEQUENCES)]
        adam.zero_grad()
        loss = loss_of(model, ids)[1] / (len(ids) - 1)
        loss.backward()
        adam.step()
        want.append(loss.item())
    common = [llama, folder, "--train", out + ".ids", "--lr", "1e-4", "--dtype", "f32"]
    text = run(*common, "--steps", "4", "--out", out + ".whole")
    got = [float(line.split()[3]) for line in text.splitlines()]
    worst = max(abs(a - b) / b for a, b in zip(got, want)) if len(got) == 4 else 1
    # Adam's first steps have the size of lr whatever the gradient's: where one is almost 0, rounding decides its sign.
    check(f"{name} training", worst <= 1e-4, f"losses to {worst:.2g}")
    if len(got) != 4:
        return
    first = run(*common, "--steps", "2", "--out", out + ".parts", "--checkpoint")
    second = run(*common, "--steps", "4", "--out", out + ".parts", "--resume")
    check(f"{name} resume", first + second == text, "the same losses")
    whole, parts = load_file(out + ".whole/model.safetensors"), load_file(out + ".parts/model.safetensors")
    check(f"{name} resume", all(torch.equal(whole[k], parts[k]) for k in whole), "the same weights")
    check(f"{name} config", json.load(open(out + ".whole/config.json")) == json.load(open(folder + "/config.json")), "the same")
    trained, info = transformers.AutoModelForCausalLM.from_pretrained(out + ".whole", dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    check(f"{name} opens", not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), "transformers opens what was written")
    trained.eval()
    run(llama, out + ".whole", "--ids", out + ".ids", "--logits", out + ".logits")
    mine, logits = load_file(out + ".logits"), reference(trained)[0]
    worst = max(error(mine[f"logits.{i}"], y) for i, y in enumerate(logits))
    check(f"{name} opens", worst <= 1e-4, f"and gets the same logits: {worst:.2g}")


def recipes(llama, folder, out, name):
    """Losses under recipes come near; weights stored quantized train."""
    exact = float(run(llama, folder, "--ids", out + ".ids", "--dtype", "bf16").split()[1])
    for recipe in ("current", "block", "mxfp8", "nvfp4"):
        got = float(run(llama, folder, "--ids", out + ".ids", "--dtype", "bf16", "--recipe", recipe).split()[1])
        # 4 bits have 8 numbers; 8 bits lose 3% in each operand.
        check(f"{name} {recipe}", got != exact and abs(got - exact) <= (0.4 if recipe == "nvfp4" else 0.1) * exact, f"loss {got:.5g}, bf16 {exact:.5g}")
    text = run(llama, folder, "--train", out + ".ids", "--lr", "1e-3", "--steps", "30", "--dtype", "bf16", "--recipe", "current", "--quantized-weights", "--checkpoint",
               "--out", out + ".quantized")
    got = [float(line.split()[3]) for line in text.splitlines()]
    check(f"{name} quantized weights", len(got) == 30 and sum(got[-3:]) < 0.7 * sum(got[:3]), f"losses from {sum(got[:3]) / 3:.4g} to {sum(got[-3:]) / 3:.4g}")
    transformers.AutoModelForCausalLM.from_pretrained(out + ".quantized")


def main():
    llama, root, words = sys.argv[1], sys.argv[2], sys.argv[3:]
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    for name, family, extra, shard in CASES:
        if words and not any(w in name for w in words):
            continue
        print(name)
        folder, out = f"{root}/{name}", f"{root}/{name}.out"
        with open(out + ".ids", "w") as f:
            f.writelines(" ".join(map(str, ids)) + "\n" for ids in SEQUENCES)
        make(family, extra, folder, shard)
        if shard:
            check(f"{name} shards", os.path.exists(folder + "/model.safetensors.index.json"), "more than one file")
        compare(llama, folder, out, name, "f32", 1e-4)
        compare(llama, folder, out, name, "bf16", 2e-2)
        generate(llama, folder, out, name)
        train(llama, folder, out, name)
        if name in ("llama", "mixtral"):
            recipes(llama, folder, out, name)
    print("all models agree" if not failures else f"{len(failures)} failed: {', '.join(failures)}")
    sys.exit(1 if failures else 0)


main()
