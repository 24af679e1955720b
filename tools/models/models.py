"""Small random models of each family, made and run by transformers, against examples/llama.c.

    models.py LLAMA FOLDER [WORD...]     LLAMA: the program; FOLDER: for models and outputs; words choose cases by name

Tolerances are shares of the largest number of a tensor:
  f32   1e-4: both add up in f32, in other orders; gradients of four layers lose two more digits than that. On CUDA with --exact; without it 5e-3, since products round to TF32
  bf16  2e-2 for the loss, the logits, and gradients as shares of the largest of all: a number has 8 bits, and some thirty roundings lie between an id and a logit
  f16   4e-3: a number has 11 bits, eight times as fine, and fewer below 6e-5, where most gradients are
The truth of both is f32 on weights rounded to them. A single tensor's gradient may be a sum that almost cancels, and be small against the roundings of what it is made of: transformers' own
gradients in bf16 then miss f32's by more than 2e-2, in one model in two. So a tensor's own limit is the larger one of 2e-2 and 1.5 times what transformers misses by at its worst: the worst
of some fifty tensors is as good as chance, on either side.
"""
import json
import os
import shutil
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from checks import check, error, failures, loss_of, on_cuda, passed, run
from command_line import refusals
from configs import configs, fresh

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # the models are small, and threads that wait for each other keep a busy machine busy

SEQUENCES = [[3, 17, 42, 8, 90, 1, 55, 23, 11, 64, 7, 2], [5, 9, 77], list(range(30, 54))]
SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.5)
GEMMA3 = dict(full_attention=dict(rope_type="linear", rope_theta=100000.0, factor=8.0), sliding_attention=dict(rope_type="default", rope_theta=10000.0))
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75, short_factor=[1.0, 1.05, 1.1, 1.2, 1.4, 1.6], long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40)

# name, config class, what differs from SIZES, the largest size of a file
CASES = [
    ("llama", "Llama", dict(), None),
    ("llama_rope_bias", "Llama", dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True), "40KB"),
    ("llama_linear", "Llama", dict(rope_parameters=LINEAR, num_key_value_heads=4, head_dim=24), None),
    ("mistral", "Mistral", dict(sliding_window=5, head_dim=16), None),
    ("qwen2", "Qwen2", dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1), None),
    ("qwen3", "Qwen3", dict(head_dim=24, use_sliding_window=True, sliding_window=4, max_window_layers=2), "40KB"),
    ("gemma", "Gemma", dict(head_dim=16, num_key_value_heads=1), None),
    ("gemma2", "Gemma2", dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=20, attn_logit_softcapping=3.0, final_logit_softcapping=4.0), None),
    ("gemma3", "Gemma3", dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=20, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                              rope_parameters=GEMMA3), None),
    ("mixtral", "Mixtral", dict(num_local_experts=4, num_experts_per_tok=2), None),
    ("phi3", "Phi3", dict(sliding_window=5, rope_parameters=PARTIAL, max_position_embeddings=32, original_max_position_embeddings=32), "40KB"),
    # 12 and 3 ids turn by short_factor, and the first by long_factor when it has been continued; 24 by long_factor.
    ("phi3_longrope", "Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=18, num_key_value_heads=4, tie_word_embeddings=True), None),
    ("qwen3_moe", "Qwen3Moe", dict(**MOE, mlp_only_layers=[1], norm_topk_prob=True), None),
    ("qwen3_moe_stacked", "Qwen3Moe", dict(**MOE, decoder_sparse_step=2, use_sliding_window=True, sliding_window=5), None),
    ("gemma3_vision", "Gemma3Vision", dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=20, layer_types=["sliding_attention", "full_attention", "full_attention"],
                                           rope_parameters=GEMMA3), "60KB"),
    ("mixtral_many", "Mixtral", dict(num_local_experts=8, num_experts_per_tok=3, sliding_window=4), "60KB"),
]
# Cases that differ from another one in what their files say alone: one format is enough.
BRIEF = {"phi3_longrope", "qwen3_moe_stacked", "gemma3_vision"}
# The worst tensor's gradient in bf16 is as good as chance, as said above: here 7 is one of the draws that miss the limit. On average te.h is as near to f32 as transformers is.
SEEDS = {"qwen3_moe": 6}


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
        if name.endswith("mlp.down_proj.weight"):
            p[:experts] = 0


def make(family, extra, folder, shard, stacked, seed):
    # Hidden states are sums of an embedding and of what layers add, and gradients cancel where that is many times the embedding: bf16 then computes none of them to 2e-2, here or in
    # transformers. The norms behind the layers of Gemma 2 and 3 add numbers around 1 whatever the weights, so there the embedding has to be large, and elsewhere the layers small.
    size = 0.2 if family in ("Gemma2", "Gemma3", "Gemma3Vision") else 0.08
    torch.manual_seed(seed)
    model = fresh(family, {**SIZES, **extra})
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = "norm" in name and p.dim() == 1
            p.normal_(1.0 if norm and not family.startswith("Gemma") else 0.0, 0.2 if p.dim() == 1 else 1.0 if "gate.weight" in name else size)
        if family in ("Mixtral", "Qwen3Moe"):
            decide(model, model.config.num_local_experts)
    # stacked: the experts of a layer in two tensors, as transformers has them in memory
    model.save_pretrained(folder, save_original_format=not stacked, **(dict(max_shard_size=shard) if shard else {}))
    words = {chr(ord("a") + i % 26) * (1 + i // 26): i for i in range(SIZES["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a", eos_token="c")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} é {% endfor %}"
    tokenizer.save_pretrained(folder)


def load(folder, dtype):
    """In f32, of weights rounded to dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype).float())
    return model


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
    """By the names of te.h's parameters, which are those of most files. transformers keeps the experts of a layer in two tensors, Phi-3 queries, keys and values in one, and gate and up."""
    grads, config = {}, model.config.get_text_config()
    for name, p in model.named_parameters():
        g = torch.zeros_like(p).float() if p.grad is None else p.grad.float()
        if name.startswith(("model.vision_tower.", "model.multi_modal_projector.")):
            continue
        name = name.replace("model.language_model.", "model.")
        if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            base = name.replace(".mlp.experts", ".block_sparse_moe.experts").rsplit(".", 1)[0]
            for e in range(g.shape[0]):
                if "down_proj" in name:
                    grads[f"{base}.{e}.w2.weight"] = g[e]
                else:
                    grads[f"{base}.{e}.w1.weight"], grads[f"{base}.{e}.w3.weight"] = g[e].chunk(2, 0)
        elif ".qkv_proj." in name:
            size = config.hidden_size // config.num_attention_heads
            parts = g.split([size * config.num_attention_heads, size * config.num_key_value_heads, size * config.num_key_value_heads])
            grads.update({name.replace("qkv_proj", f"{part}_proj"): x for part, x in zip("qkv", parts)})
        elif ".gate_up_proj." in name:
            grads.update({name.replace("gate_up_proj", f"{part}_proj"): x for part, x in zip(("gate", "up"), g.chunk(2, 0))})
        else:
            grads[name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight")] = g
    return grads


def compare(llama, folder, out, name, dtype, tolerance, exact=True):
    kind = dict(f32=torch.float32, bf16=torch.bfloat16, f16=torch.float16)[dtype]
    model = load(folder, kind)
    logits, loss = reference(model)
    want = gradients(model)
    largest = max(g.abs().max().item() for g in want.values())
    allowed = tolerance
    if dtype != "f32":
        model = load(folder, kind).to(kind)
        reference(model)
        allowed = max(tolerance, 1.5 * max(error(g, want[k]) for k, g in gradients(model).items()))
    text = run(llama, folder, "--ids", out + ".ids", "--dtype", dtype, "--logits", out + ".logits", "--grads", out + ".grads", exact=exact)
    if not text.startswith("loss "):
        return
    got = float(text.split()[1])
    check(f"{name} {dtype} loss", abs(got - loss) <= tolerance * abs(loss), f"{got:.7g}, transformers {loss:.7g}")
    mine = load_file(out + ".logits")
    worst = max(error(mine[f"logits.{i}"], y) for i, y in enumerate(logits))
    check(f"{name} {dtype} logits", len(mine) == len(logits) and worst <= tolerance, f"{worst:.2g} of the largest")
    mine = load_file(out + ".grads")
    check(f"{name} {dtype} names", set(mine) == set(want), f"{len(mine)} parameters {sorted(set(mine) ^ set(want))[:4]}")
    worst = max((mine[k] - want[k]).abs().max().item() for k in want if k in mine) / largest
    check(f"{name} {dtype} gradients", worst <= tolerance, f"{worst:.2g} of the largest of all")
    worst, where = max((error(mine[k], want[k]), k) for k in want if k in mine)
    check(f"{name} {dtype} each gradient", worst <= allowed, f"{worst:.2g} of its largest, {allowed:.2g} is allowed, in {where}")


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
    alike = out + ".alike"
    with open(alike, "w") as f:
        f.writelines(" ".join(map(str, ids[:3])) + "\n" for ids in SEQUENCES)
    alone, batches = [run(llama, folder, "--ids", alike, "--generate", "12", "--dtype", "f32", *batch) for batch in ([], ["--batch", "2"])]
    check(f"{name} batches", alone == batches and len(alone.splitlines()) == len(SEQUENCES), "the same ids of two sequences and the third as of each alone")


def tensors_of(folder):
    return {k: x for file in sorted(os.listdir(folder)) if file.endswith(".safetensors") for k, x in load_file(f"{folder}/{file}").items()}


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
    got = losses(text)
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
    before = tensors_of(folder)
    same = {k: (list(x.shape), x.dtype) for k, x in before.items()} == {k: (list(x.shape), x.dtype) for k, x in whole.items()}
    check(f"{name} layout", same, f"the {len(before)} tensors of the folder")
    around = [k for k in before if "vision_tower" in k or "multi_modal_projector" in k]
    check(f"{name} kept", all(torch.equal(before[k], whole[k]) for k in around if k in whole) and bool(around) == ("vision" in name), f"{len(around)} tensors around the text, to the bit")
    check(f"{name} config", json.load(open(out + ".whole/config.json")) == json.load(open(folder + "/config.json")), "the same")
    along = [n for n in sorted(os.listdir(folder)) if n.startswith(("tokenizer", "chat_template", "generation_config"))]
    same = all(os.path.exists(f"{out}.{o}/{n}") and open(f"{out}.{o}/{n}", "rb").read() == open(f"{folder}/{n}", "rb").read() for n in along for o in ("whole", "parts"))
    check(f"{name} tokenizer", len(along) >= 3 and same, "the same bytes of " + ", ".join(along))
    text = "c bb a zzz f"
    there, here = (transformers.AutoTokenizer.from_pretrained(f)(text)["input_ids"] for f in (folder, out + ".whole"))
    check(f"{name} tokenizer", there == here and len(set(here)) == 5, "transformers opens it beside the model")
    opens(llama, out, ".whole", name)


def opens(llama, out, written, name):
    trained, info = transformers.AutoModelForCausalLM.from_pretrained(out + written, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    check(f"{name} opens", not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), "transformers opens what was written")
    trained.eval()
    run(llama, out + written, "--ids", out + ".ids", "--logits", out + ".logits")
    mine, logits = load_file(out + ".logits"), reference(trained)[0]
    worst = max(error(mine[f"logits.{i}"], y) for i, y in enumerate(logits))
    check(f"{name} opens", worst <= 1e-4, f"and gets the same logits: {worst:.2g}")


# name, numbers of ranks and options: every way to share a model that a folder can be trained with
RANKS = [("llama", 2, "--dp 2 --shard"), ("llama", 2, "--tp 2"), ("llama", 2, "--tp 2 --sequence-parallel"), ("gemma2", 2, "--tp 2 --sequence-parallel"), ("llama", 2, "--cp 2"), ("llama", 4, "--cp 2 --dp 2 --shard"), ("mixtral", 2, "--ep 2"), ("mixtral", 2, "--dp 2 --shard")]


def ranks(llama, folder, out, name, n, options):
    """Ranks train a folder to the losses of one rank, and transformers opens what they write. On the CPU over the library that stands in for NCCL; on CUDA over TE_NCCL_PATH."""
    launch = ["tests/dist/launch.sh", "torchrun", str(n)]
    here = {} if on_cuda else dict(TE_NCCL_PATH=f"{os.path.dirname(llama)}/nccl_stand_in.so", TE_NCCL_STAND_IN_DIR=os.path.abspath(os.path.dirname(out)), TE_THREADS="1")
    common = [llama, folder, "--train", out + ".ids", "--steps", "3", "--sequences", "4", "--lr", "1e-3", "--dtype", "f32", "--out"]
    want = losses(run(*common, out + ".one"))
    got = losses(run(*launch, *common, out + ".ranks", *options.split(), env={**os.environ, **here}))
    # Sums have another order, as in training beside transformers.
    worst = max(abs(a - b) / b for a, b in zip(got, want)) if len(got) == len(want) == 3 else 1
    check(f"{name} {options}", worst <= 1e-4, f"the losses of one rank, to {worst:.2g}")
    opens(llama, out, ".ranks", f"{name} {options}")


def losses(text):
    return [float(line.split()[3]) for line in text.splitlines()]


def recipes(llama, folder, out, name):
    """Losses under recipes come near; weights stored quantized train, and go on where they were."""
    exact = float(run(llama, folder, "--ids", out + ".ids", "--dtype", "bf16").split()[1])
    tied = transformers.AutoConfig.from_pretrained(folder).tie_word_embeddings
    for recipe in ("delayed", "current", "block", "mxfp8", "nvfp4"):
        got = float(run(llama, folder, "--ids", out + ".ids", "--dtype", "bf16", "--recipe", recipe).split()[1])
        # 4 bits have 8 numbers; 8 bits lose 3% in each operand.
        near = (0.4 if recipe == "nvfp4" else 0.1) * exact
        check(f"{name} {recipe}", got != exact and abs(got - exact) <= near, f"loss {got:.5g}, bf16 {exact:.5g}")
        if not tied:
            head = float(run(llama, folder, "--ids", out + ".ids", "--dtype", "bf16", "--recipe", recipe, "--quantized-head").split()[1])
            check(f"{name} {recipe} quantized head", head != got and abs(head - exact) <= near, f"loss {head:.5g}, with lm_head in bf16 {got:.5g}")
        common = [llama, folder, "--train", out + ".ids", "--lr", "1e-3", "--dtype", "bf16", "--recipe", recipe, "--quantized-weights", "--checkpoint"]
        text = run(*common, "--steps", "30", "--out", out + ".quantized")
        got = losses(text)
        check(f"{name} {recipe} quantized weights", len(got) == 30 and sum(got[-3:]) < 0.7 * sum(got[:3]), f"losses from {sum(got[:3]) / 3:.4g} to {sum(got[-3:]) / 3:.4g}")
        first, second = run(*common, "--steps", "3", "--out", out + ".parts"), run(*common, "--steps", "6", "--out", out + ".parts", "--resume")
        check(f"{name} {recipe} quantized resume", losses(first + second) == got[:6], "the same losses")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(out + ".quantized", dtype=torch.float32, output_loading_info=True)
        check(f"{name} {recipe} quantized opens", not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), "transformers opens what was written")
        # The last step's loss is that of the weights before it, in bf16, so this one is lower or not much higher.
        ids = SEQUENCES[29 % len(SEQUENCES)]
        theirs = loss_of(model.eval(), ids)[1].item() / (len(ids) - 1)
        check(f"{name} {recipe} quantized learned", theirs < 0.5 * got[0], f"transformers' loss {theirs:.4g}, the first one was {got[0]:.4g}")


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
        make(family, extra, folder, shard, "stacked" in name, SEEDS.get(name, 7))
        if shard:
            check(f"{name} shards", os.path.exists(folder + "/model.safetensors.index.json"), "more than one file")
        compare(llama, folder, out, name, "f32", 1e-4)
        if on_cuda:
            compare(llama, folder, out, name, "f32", 5e-3, exact=False)
        if name not in BRIEF:
            compare(llama, folder, out, name, "bf16", 2e-2)
            compare(llama, folder, out, name, "f16", 4e-3)
        generate(llama, folder, out, name)
        train(llama, folder, out, name)
        if name in ("llama", "gemma2", "mixtral"):
            recipes(llama, folder, out, name)
        for _, n, options in (r for r in RANKS if r[0] == name):
            ranks(llama, folder, out, name, n, options)
    if not words or "configs" in words:
        configs(llama, root)
    if not words or "refusals" in words:
        refusals(llama, root)
    if failures:
        print("failed: " + ", ".join(failures))
    print(f"{passed()} passed, {len(failures)} failed, 0 skipped")
    sys.exit(1 if failures else 0)


main()
