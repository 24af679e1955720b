"""make_folder.py llama|mixtral FOLDER: writes a small random model in the layout of Hugging Face transformers, and sequences for it (FOLDER/ids)."""
import json, os, random, struct, sys

kind, folder = sys.argv[1:3]
os.makedirs(folder, exist_ok=True)
random.seed(3)
hidden, inner, layers, heads, groups, vocabulary, experts = 32, 64, 2, 4, 2, 64, 4
config = dict(model_type=kind, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
              vocab_size=vocabulary, rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=512, rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="float32",
              architectures=[{"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}[kind]])
if kind == "mixtral":
    config.update(num_local_experts=experts, num_experts_per_tok=2)
tensors = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden], "lm_head.weight": [vocabulary, hidden]}
for i in range(layers):
    p = "model.layers.%d." % i
    size = hidden // heads * groups
    tensors.update({p + "self_attn.q_proj.weight": [hidden, hidden], p + "self_attn.k_proj.weight": [size, hidden], p + "self_attn.v_proj.weight": [size, hidden],
                    p + "self_attn.o_proj.weight": [hidden, hidden], p + "input_layernorm.weight": [hidden], p + "post_attention_layernorm.weight": [hidden]})
    if kind == "llama":
        tensors.update({p + "mlp.gate_proj.weight": [inner, hidden], p + "mlp.up_proj.weight": [inner, hidden], p + "mlp.down_proj.weight": [hidden, inner]})
    else:
        tensors[p + "block_sparse_moe.gate.weight"] = [experts, hidden]
        for e in range(experts):
            q = p + "block_sparse_moe.experts.%d." % e
            tensors.update({q + "w1.weight": [inner, hidden], q + "w3.weight": [inner, hidden], q + "w2.weight": [hidden, inner]})
header, data = {"__metadata__": {"format": "pt"}}, b""
for name, shape in tensors.items():
    n = 1
    for d in shape:
        n *= d
    scale = 0.2 if len(shape) == 2 else 0.1
    values = [random.gauss(0.0 if len(shape) == 2 else 1.0, scale) for _ in range(n)]
    header[name] = dict(dtype="F32", shape=shape, data_offsets=[len(data), len(data) + 4 * n])
    data += struct.pack("<%df" % n, *values)
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(os.path.join(folder, "model.safetensors"), "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text + data)
with open(os.path.join(folder, "config.json"), "w") as f:
    json.dump(config, f, indent=1)
with open(os.path.join(folder, "ids"), "w") as f:  # lengths differ, and no two sequences are alike
    for i in range(7):
        f.write(" ".join(str(random.randrange(vocabulary)) for _ in range(11 + 5 * (i % 4))) + "\n")
