"""Calls of the program that cannot work: one line that says why, exit status 1, and nothing written."""
import json
import os
import shutil
import subprocess

import torch
import transformers
from safetensors.torch import load_file, save_file

from checks import check, loss_of, run
from configs import make


def shard(folder, change):
    """The folder's weights in two files, after `change` of their parts and of the index."""
    weights = load_file(folder + "/model.safetensors")
    os.remove(folder + "/model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": {n: weights[n] for n in names[:10]}, "b.safetensors": {n: weights[n] for n in names[10:]}}
    index = {n: file for file, part in parts.items() for n in part}
    change(parts, index, names)
    for file, part in parts.items():
        save_file(part, f"{folder}/{file}", {"format": "pt"})
    json.dump(dict(weight_map=index), open(folder + "/model.safetensors.index.json", "w"))


def swap(parts, index, names):
    index[names[0]] = "b.safetensors"


def lose(parts, index, names):
    del parts["b.safetensors"][names[-1]], index[names[-1]]


def spare(parts, index, names):
    parts["a.safetensors"]["model.layers.7.input_layernorm.weight"] = torch.ones(32)
    index["model.layers.7.input_layernorm.weight"] = "a.safetensors"


def twice(parts, index, names):
    parts["b.safetensors"][names[0]] = parts["a.safetensors"][names[0]]


def reshape(parts, index, names):
    parts["a.safetensors"][names[0]] = parts["a.safetensors"][names[0]][:-1].contiguous()


def integers(parts, index, names):
    parts["a.safetensors"][names[0]] = parts["a.safetensors"][names[0]].to(torch.int32)


def outside(parts, index, names):
    index[names[0]] = "../a.safetensors"


def missing_file(parts, index, names):
    index[names[0]] = "c.safetensors"


# how the folder is changed, and what the message names: the files, the tensor, both values
FOLDERS = [
    (swap, ["index.json", "lm_head.weight", "b.safetensors"]),
    (lose, ["index.json", "model.norm.weight", "config.json"]),
    (spare, ["a.safetensors", "model.layers.7.input_layernorm.weight", "config.json", "3 layers"]),
    (twice, ["b.safetensors", "lm_head.weight", "index.json", "a.safetensors"]),
    (reshape, ["a.safetensors", "lm_head.weight", "[63, 32]", "[64, 32]", "config.json"]),
    (integers, ["a.safetensors", "lm_head.weight", "i32"]),
    (outside, ["index.json", "lm_head.weight", "../a.safetensors"]),
    (missing_file, ["c.safetensors"]),
]

# config.json as a text of an enemy, in place of the true one, and what the message says
TEXTS = [
    ("", "byte 0"),
    ("[" * 100000, "'{' is missing"),
    ('{"a": ' + "[" * 100000, "brackets within each other"),
    ('{"a": ' * 100000, "brackets within each other"),
    ('{"model_type": "llama"', "is missing"),
    ('{"model_type": "lla', "ends within a string"),
    ('{"hidden_size": 1e400}', "a whole number is missing|not whole"),
    ('{"hidden_size": 1' + "0" * 400 + "}", "63 bits"),
    ('{"rope_theta": 1e400}', "too large"),
    ('{"rope_theta": NaN}', "digit is missing"),
    ('{"rope_theta": -Infinity}', "digit is missing"),
    ('{"vocab_size": -5}', "a whole number is missing"),
    ('{"vocab_size": 5, "vocab_size": 6}', '"vocab_size" is given twice'),
    ('{"model_type": "\\ud800"}', "surrogate"),
    ('{"model_type": "' + "x" * 1000000 + '"}', 'model_type is "xxx'),
    ('{"model_type": "llama"} {}', "something follows the end"),
    ('{"layer_types": [' + '"full_attention", ' * 200000 + '"full_attention"]}', "more than 100000 entries"),
    (" " * (17 << 20) + "{}", "config.json"),
]


def relatives(llama, refused, root, ids):
    """Folders that do not open; then the line of Python that the message ends with is carried out, and what it writes opens."""
    def convert(folder, *says):
        line = refused([folder, *ids], *says).partition("with transformers: ")[2]
        exec(line, dict(AutoModelForCausalLM=transformers.AutoModelForCausalLM))

    def compare(name, model, folder):
        sequences = [[int(i) for i in line.split()] for line in open(ids[1])]
        with torch.no_grad():
            want = sum(loss_of(model.eval(), s)[1].item() for s in sequences) / sum(len(s) - 1 for s in sequences)
        got = float(run(llama, folder, *ids, "--dtype", "f32").split()[1])
        # Sums in other orders, as models.py has it.
        check(name, abs(got - want) <= 1e-4 * want, f"opens when converted: loss {got:.7g}, in transformers {want:.7g}")

    folder = root + "/refused.pickled"
    make(folder, "Llama", {})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.save(load_file(folder + "/model.safetensors"), folder + "/pytorch_model.bin")
    os.remove(folder + "/model.safetensors")
    convert(folder, "refused.pickled/pytorch_model.bin")
    compare("refused pickled", model, folder)


def refusals(llama, root):
    print("refusals")
    base, out = root + "/refused.base", root + "/refused.out"
    make(base, "Llama", {})
    files = dict(ids="1 2 3\n4 5\n", empty="\n \n", word="1 2 three\n", large="1 64\n", negative="1 -2, 3\n", huge="99999999999999999999\n", one="7\n")
    for name, text in files.items():
        with open(f"{out}.{name}", "w") as f:
            f.write(text)

    def refused(args, *says):
        r = subprocess.run([llama, *args], capture_output=True, text=True, timeout=60)
        fine = r.returncode == 1 and not r.stdout and r.stderr.count("\n") == 1 and all(any(word in r.stderr for word in s.split("|")) for s in says)
        check("refused " + " ".join(a.replace(root + "/", "") for a in args), fine, r.stderr.strip() or f"status {r.returncode}, {r.stdout!r}")
        return r.stderr.strip()

    ids, train = ["--ids", out + ".ids"], ["--train", out + ".ids", "--out", root + "/refused.new"]
    refused([], "a FOLDER and either --ids or --train")
    refused([base], "a FOLDER and either --ids or --train")
    refused(ids, "a FOLDER")
    refused([base, *ids, *train], "either --ids or --train")
    refused([base, base, *ids], "--help")
    refused([base, *ids, "--frobnicate"], "--frobnicate", "--help")
    refused([base, "--ids"], "--ids needs a value")
    refused([base, *ids, "--generate", "x"], "--generate x")
    refused([base, *ids, "--generate", "1.5"], "--generate 1.5")
    refused([base, *ids, "--generate", "-1"], "--generate -1")
    refused([base, *ids, "--generate", "1e30"], "--generate 1e30")
    refused([base, *ids, "--no-cache"], "--no-cache", "--generate")
    refused([base, *ids, "--cache-dtype", "fp8"], "--cache-dtype", "--generate")
    refused([base, *ids, "--generate", "2", "--cache-dtype", "fp4"], "--cache-dtype fp4", "fp8")
    refused([base, *ids, "--generate", "2", "--logits", out + ".x"], "--logits", "--generate")
    refused([base, *ids, "--batch", "2"], "--batch", "--generate")
    refused([base, *ids, "--batch", "0", "--generate", "2"], "--batch 0")
    refused([base, *ids, "--batch", "2", "--generate", "2"], "sequence 1, which has 2 ids, with sequence 0, which has 3")
    refused([base, *ids, "--resume"], "--resume", "--train")
    refused([base, *ids, "--out", out], "--out", "--train")
    refused([base, *train, "--grads", out + ".x"], "--grads", "--ids")
    refused([base, *train, "--lr", "nan"], "--lr nan")
    refused([base, *train, "--lr", "inf"], "--lr inf")
    refused([base, *train, "--steps", "ten"], "--steps ten")
    refused([base, *train, "--quantized-weights"], "--quantized-weights needs --recipe")
    refused([base, *train, "--quantized-head"], "--quantized-head needs --recipe")
    refused([base, *train, "--resume"], "refused.new/training.safetensors")
    refused([base, "--train", out + ".ids"], "--train needs --out")
    refused([base, "--train", out + ".one", "--out", root + "/refused.new"], "sequence 0 has one id")
    refused([base, "--train", out + ".ids", "--steps", "1", "--out", out + ".ids/x"], out + ".ids/x")
    refused([base, *ids, "--dtype", "f8"], "--dtype f8")
    refused([base, *ids, "--recipe", "fp9"], "--recipe fp9")
    refused([base, *ids, "--device", "abacus"], "abacus")
    refused([base, "--ids", out + ".nothing"], out + ".nothing")
    refused([base, "--ids", root], root)
    for name, says in dict(empty="has no sequence", word='line 1: "three"', large='"64"', negative='"-2"', huge='"99999999999999999999"').items():
        refused([base, "--ids", f"{out}.{name}"], f"{out}.{name}", says)
    refused([root + "/nowhere", *ids], "nowhere/config.json")
    relatives(llama, refused, root, ids)
    for change, says in FOLDERS:
        folder = root + "/refused.folder"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        shard(folder, change)
        refused([folder, *ids], *says)
    for text, says in TEXTS:
        with open(root + "/refused.base/config.json", "w") as f:
            f.write(text)
        refused([base, *ids], "refused.base/config.json", says)
    check("refused", not os.path.exists(root + "/refused.new") and not os.path.exists(out + ".x"), "nothing was written")
