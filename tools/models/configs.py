"""config.json as people write it: keys that are missing, null, of older versions, or of other families. The program computes what transformers computes, or refuses the file by name."""
import json
import os
import shutil
import subprocess

import torch
import transformers
from safetensors.torch import load_file

from checks import check, error, run

GONE = object()  # the key is taken out
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
SHARE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.5, 2.0], long_factor=[2.0, 3.0, 4.0, 8.0])
SU = dict(type="su", original_max_position_embeddings=10, short_factor=[1.0, 1.1, 1.5, 2.0], long_factor=[2.0, 3.0, 4.0, 8.0])
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, bos_token_id=None,
             eos_token_id=None, pad_token_id=None)
GEMMA = dict(head_dim=8, query_pre_attn_scalar=20)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)


class Text(dict):
    """Changes of text_config."""


BASES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=5)),
    "mixtral": ("Mixtral", dict(num_local_experts=4)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "gemma": ("Gemma", dict(head_dim=8)),
    "gemma2": ("Gemma2", dict(sliding_window=5, **GEMMA)),
    "gemma3": ("Gemma3", dict(sliding_window=5, **GEMMA)),
    "phi3": ("Phi3", dict(original_max_position_embeddings=16)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)),
    "vision": ("Gemma3Vision", dict(sliding_window=5, **GEMMA)),
}

# base, changes, and None where the logits are those of transformers, or what the refusal says
VARIANTS = [
    ("llama", dict(hidden_act="relu"), None),
    ("llama", dict(hidden_act="relu2"), None),
    ("llama", dict(hidden_act="quick_gelu"), None),
    ("llama", dict(hidden_act="sigmoid"), None),
    ("llama", dict(hidden_act="gelu_new"), None),
    ("llama", dict(hidden_act="gelu"), 'hidden_act is "gelu"'),
    ("llama", dict(hidden_activation="relu"), None),
    ("llama", dict(sliding_window=5), None),
    ("llama", dict(sliding_window_pattern=None), None),
    ("llama", dict(tie_word_embeddings=True), 'tensor "lm_head.weight" differs from "model.embed_tokens.weight"'),
    ("llama", dict(layer_types=[FULL] * 3), None),
    ("llama", dict(layer_types=[FULL, SLIDING, FULL], sliding_window=5), 'layer_types[1] is "sliding_attention"'),
    ("llama", dict(head_dim=None), None),
    ("llama", dict(head_dim=GONE), None),
    ("llama", dict(head_dim=0), "head_dim is 0"),
    ("llama", dict(num_key_value_heads=None), None),
    ("llama", dict(num_key_value_heads=GONE), None),
    ("llama", dict(rms_norm_eps=GONE), None),
    ("llama", dict(rms_norm_eps=0.01), None),
    ("llama", dict(rope_parameters=GONE), None),
    ("llama", dict(rope_parameters=GONE, rope_theta=100.0), None),
    ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=300.0), rope_theta=100.0), None),
    ("llama", dict(rope_parameters=GONE, rope_scaling=dict(type="linear", factor=2.0), rope_theta=100.0), None),
    ("llama", dict(rope_parameters=GONE, rope_scaling=LLAMA3), None),
    ("llama", dict(rope_parameters=LLAMA3, original_max_position_embeddings=4), None),
    ("llama", dict(rope_parameters={k: v for k, v in LLAMA3.items() if k[0] != "o"}), "original_max_position_embeddings is missing"),
    ("llama", dict(rope_parameters=YARN), None),
    ("llama", dict(rope_parameters=dict(YARN, factor=None)), None),
    ("llama", dict(rope_parameters=dict(YARN, beta_fast=2.0, beta_slow=0.25, mscale=0.7, mscale_all_dim=0.4, truncate=False)), None),
    ("llama", dict(rope_parameters=dict(YARN, attention_factor=0.8)), None),
    ("llama", dict(rope_parameters=dict(YARN, beta_fast=1.0, beta_slow=2.0)), "beta_fast 1 and beta_slow 2"),
    ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=3.0), max_position_embeddings=5), None),
    ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=3.0)), None),
    ("llama", dict(rope_parameters=dict(YARN, rope_type="longrope", short_factor=[1.0, 1.1, 1.5, 2.0], long_factor=[2.0, 3.0, 4.0, 8.0])), None),
    ("llama", dict(rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.5, 2.0], long_factor=[2.0, 3.0, 4.0, 8.0]), original_max_position_embeddings=8), None),
    ("llama", dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "it has rope_scaling and rope_parameters"),
    ("llama", dict(rope_parameters={FULL: dict(rope_type="linear", factor=2.0)}), "transformers reads those of a llama without kinds of layers"),
    ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)), "partial_rotary_factor is 0.5"),
    ("llama", dict(is_causal=False), "is_causal is false"),
    ("llama", dict(per_layer_config={"0": {"intermediate_size": 16}}), "per_layer_config"),
    ("llama", dict(use_sliding_window=True, sliding_window=5, max_window_layers=0), None),
    ("llama", dict(num_experts=2, query_pre_attn_scalar=4, attn_logit_softcapping=1.0, final_logit_softcapping=1.0), None),
    ("mistral", dict(sliding_window=None), None),
    ("mistral", dict(sliding_window=GONE), None),
    ("mistral", dict(sliding_window=0), "sliding_window is 0"),
    ("mistral", dict(use_sliding_window=False), None),
    ("mistral", dict(layer_types=[SLIDING] * 3), None),
    ("mistral", dict(layer_types=[SLIDING, SLIDING, FULL]), 'layer_types[2] is "full_attention"'),
    ("mistral", dict(attention_bias=True, mlp_bias=True), None),
    ("mistral", dict(num_key_value_heads=None), "num_key_value_heads is null"),
    ("mixtral", dict(sliding_window=4), None),
    ("mixtral", dict(sliding_window=GONE), None),
    ("mixtral", dict(num_local_experts=GONE, num_experts=4), None),
    ("mixtral", dict(num_experts=4), '"num_experts" is given twice'),
    ("mixtral", dict(num_experts_per_tok=5), "num_experts_per_tok is 5 and num_local_experts 4"),
    ("mixtral", dict(num_experts_per_tok=3), None),
    ("mixtral", dict(rope_parameters=GONE), None),
    ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise is 0.1"),
    ("qwen2", dict(use_sliding_window=False, layer_types=GONE), None),
    ("qwen2", dict(use_sliding_window=GONE, layer_types=GONE), None),
    ("qwen2", dict(layer_types=GONE), None),
    ("qwen2", dict(layer_types=GONE, max_window_layers=GONE), None),
    ("qwen2", dict(layer_types=GONE, sliding_window=None), None),
    ("qwen2", dict(layer_types=GONE, sliding_window=GONE), None),
    ("qwen2", dict(layer_types=[SLIDING, FULL, SLIDING]), None),
    ("qwen2", dict(use_sliding_window=False), "use_sliding_window is not true"),
    ("qwen2", dict(sliding_window=None), "sliding_window is null"),
    ("qwen2", dict(attention_bias=True), None),
    ("qwen2", dict(num_key_value_heads=GONE), "num_attention_heads is 4 and num_key_value_heads 32"),
    ("qwen3", dict(num_key_value_heads=None), None),
    ("qwen3", dict(layer_types=GONE), None),
    ("qwen3", dict(layer_types=GONE, use_sliding_window=False), None),
    ("qwen3", dict(head_dim=None), "head_dim is null"),
    ("gemma", dict(hidden_act="gelu"), None),
    ("gemma", dict(hidden_act="relu", hidden_activation="silu"), None),
    ("gemma", dict(hidden_act=GONE), None),
    ("gemma", dict(sliding_window=5, layer_types=[FULL] * 3), None),
    ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention is true"),
    ("gemma2", dict(hidden_act="relu"), None),
    ("gemma2", dict(hidden_activation="relu"), None),
    ("gemma2", dict(hidden_activation=GONE), None),
    ("gemma2", dict(layer_types=GONE), None),
    ("gemma2", dict(layer_types=GONE, sliding_window=GONE), None),
    ("gemma2", dict(sliding_window=None), "sliding_window is null"),
    ("gemma2", dict(query_pre_attn_scalar=GONE), None),
    ("gemma2", dict(attn_logit_softcapping=None), None),
    ("gemma2", dict(attn_logit_softcapping=GONE, final_logit_softcapping=GONE), None),
    ("gemma2", dict(attn_logit_softcapping=0.5, final_logit_softcapping=None), None),
    ("gemma2", dict(attn_logit_softcapping=0.0), "attn_logit_softcapping is 0"),
    ("gemma3", dict(layer_types=GONE), None),
    ("gemma3", dict(layer_types=GONE, sliding_window_pattern=2), None),
    ("gemma3", dict(layer_types=GONE, _sliding_window_pattern=2), None),
    ("gemma3", dict(layer_types=GONE, sliding_window_pattern=0), "sliding_window_pattern is 0"),
    ("gemma3", dict(rope_parameters=GONE), None),
    ("gemma3", dict(rope_parameters=GONE, rope_theta=50.0, rope_local_base_freq=20.0), None),
    ("gemma3", dict(rope_parameters=GONE, layer_types=[SLIDING, FULL, FULL], rope_scaling=dict(rope_type="linear", factor=8.0)), None),
    ("gemma3", dict(rope_parameters={SLIDING: dict(rope_type="default", rope_theta=30.0)}), None),
    ("gemma3", dict(rope_parameters=dict(rope_type="default", rope_theta=30.0)), "transformers reads those of a gemma3_text by kinds of layers"),
    ("gemma3", dict(final_logit_softcapping=0.5), None),
    ("gemma3", dict(attn_logit_softcapping=1.0), "attn_logit_softcapping is 1, and transformers computes a gemma3_text without"),
    ("gemma3", dict(use_bidirectional_attention=False), None),
    ("phi3", dict(rope_parameters=SHARE), None),
    ("phi3", dict(rope_parameters=GONE, partial_rotary_factor=0.5), None),
    ("phi3", dict(rope_parameters=SHARE, partial_rotary_factor=1.0), None),
    ("phi3", dict(rope_parameters=dict(SHARE, partial_rotary_factor=0.4)), "rotates 3 of 8 channels"),
    ("phi3", dict(rope_parameters=dict(SHARE, partial_rotary_factor=1.5)), "partial_rotary_factor is 1.5"),
    ("phi3", dict(rope_parameters=LONGROPE), None),
    ("phi3", dict(rope_parameters=dict(LONGROPE, attention_factor=0.7, partial_rotary_factor=0.5, short_factor=[1.0, 1.5], long_factor=[2.0, 3.0])), None),
    ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=24), None),
    ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=GONE), None),
    ("phi3", dict(rope_parameters=dict(LONGROPE, original_max_position_embeddings=8), max_position_embeddings=16), None),
    ("phi3", dict(rope_parameters=GONE, rope_scaling=SU, rope_theta=100.0), None),
    ("phi3", dict(rope_parameters=dict(LONGROPE, rope_type="linear", factor=2.0)), 'rope_type is "linear"; a phi3 has default and longrope'),
    ("phi3", dict(rope_parameters=dict(LONGROPE, partial_rotary_factor=0.5)), "short_factor has 4 numbers and long_factor 4; 2 are needed"),
    ("phi3", dict(num_key_value_heads=None), None),
    ("phi3", dict(sliding_window=5, rms_norm_eps=GONE), None),
    ("phi3", dict(resid_pdrop=0.1), "resid_pdrop is 0.1"),
    ("qwen3_moe", dict(norm_topk_prob=GONE), None),
    ("qwen3_moe", dict(num_experts_per_tok=3, norm_topk_prob=False), None),
    ("qwen3_moe", dict(num_experts_per_tok=5), "num_experts_per_tok is 5 and num_local_experts 4"),
    ("qwen3_moe", dict(num_local_experts=GONE, num_experts=4), None),
    ("qwen3_moe", dict(num_local_experts=GONE), "with num_local_experts 128 each"),
    ("qwen3_moe", dict(num_experts_per_tok=GONE), "num_experts_per_tok is 8 and num_local_experts 4"),
    ("qwen3_moe", dict(moe_intermediate_size=0), "moe_intermediate_size is 0"),
    ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step is 0"),
    ("qwen3_moe", dict(decoder_sparse_step=GONE, mlp_only_layers=GONE, intermediate_size=7), None),
    ("qwen3_moe", dict(mlp_only_layers=[7, 7]), None),
    ("qwen3_moe", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2), None),
    ("qwen3_moe", dict(use_sliding_window=True, sliding_window=GONE), None),
    ("qwen3_moe", dict(sliding_window=5), None),
    ("vision", dict(tie_word_embeddings=GONE), None),
    ("vision", dict(text_config=GONE), "text_config is missing, and a gemma3 needs it"),
    ("vision", dict(final_logit_softcapping=1.0, vocab_size=3), None),
    ("vision", Text(layer_types=GONE, _sliding_window_pattern=GONE, sliding_window_pattern=2), None),
    ("vision", Text(model_type=GONE, tie_word_embeddings=False), None),
    ("vision", Text(rope_parameters=GONE, rope_theta=50.0, rope_local_base_freq=20.0), None),
    ("vision", Text(final_logit_softcapping=1.0), "final_logit_softcapping is 1, and transformers computes a gemma3 without"),
    ("vision", Text(model_type="llama"), 'text_config has model_type "llama"; that of a gemma3 is gemma3_text'),
    ("vision", Text(head_dim=0), "head_dim is 0"),
]


def fresh(family, keys):
    """A model of transformers with these keys."""
    if family == "Gemma3Vision":
        return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(text_config=keys, vision_config=VISION, mm_tokens_per_image=1))
    kind = "Gemma3Text" if family == "Gemma3" else family
    return getattr(transformers, family + "ForCausalLM")(getattr(transformers, kind + "Config")(**keys))


def make(folder, family, extra):
    torch.manual_seed(3)
    model = fresh(family, {**SIZES, **extra})
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if p.dim() == 1 and "norm" in name and not family.startswith("Gemma") else 0.0, 0.2)
    model.save_pretrained(folder)


def logits_of(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def edited(base, folder, changes):
    """The same weights with another config.json."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    config = json.load(open(base + "/config.json"))
    keys = config["text_config"] if isinstance(changes, Text) else config
    for key, value in changes.items():
        keys.pop(key, None) if value is GONE else keys.update({key: value})
    json.dump(config, open(folder + "/config.json", "w"))


def same(llama, folder, out, name, ids):
    try:
        want = logits_of(folder, ids)
    except Exception as e:
        return check(name, False, f"transformers does not open it: {str(e).strip().splitlines()[-1]}")
    run(llama, folder, "--ids", out + ".ids", "--dtype", "f32", "--logits", out + ".logits")
    worst = error(load_file(out + ".logits")["logits.0"], want) if os.path.exists(out + ".logits") else 1
    check(name, worst <= 1e-4, f"{worst:.2g} of the largest logit")


def configs(llama, root):
    print("configs")
    out, ids = root + "/configs.out", [(7 * i * i + 3 * i) % 64 for i in range(20)]
    with open(out + ".ids", "w") as f:
        print(*ids, file=f)
    for name, (family, extra) in BASES.items():
        make(f"{root}/{name}.base", family, extra)
    for base, changes, refusal in VARIANTS:
        folder = root + "/config"
        edited(f"{root}/{base}.base", folder, changes)
        name = f"{base} {json.dumps({k: 'GONE' if v is GONE else v for k, v in changes.items()})}"
        if os.path.exists(out + ".logits"):
            os.remove(out + ".logits")
        if not refusal:
            same(llama, folder, out, name, ids)
            continue
        r = subprocess.run([llama, folder, "--ids", out + ".ids"], capture_output=True, text=True)
        check(name, r.returncode == 1 and refusal in r.stderr and "config.json" in r.stderr, r.stderr.strip() or "it opens")
    # Without sliding_window a Mistral sees 4096 ids back: one more than that shows.
    ids = [(5 * i * i + i) % 64 for i in range(4100)]
    with open(out + ".ids", "w") as f:
        print(*ids, file=f)
    make(root + "/long", "Mistral", dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=8192))
    edited(root + "/long", root + "/config", dict(sliding_window=GONE))
    same(llama, root + "/config", out, "mistral without sliding_window, 4100 ids", ids)
