"""Writes tests/golden/backends.txt: what Automodel's BackendConfig makes of every combination of its choices.

    python backends.py FILE       golden.py calls write() as well

The ten rules of BackendConfig.__post_init__, as they stand in the documentation of te_backend_config_validate, written down a second
time; nothing here knows te.h. A line is COUNT PATTERN: so many combinations of (cuda_graph, te_fp8, linear, attn, rms_norm), each in
the order of its list below and with the last one changing fastest, have this pattern. Its characters are the combinations of (experts,
dispatcher), likewise:

    .   accepted, and nothing is rewritten
    t   accepted, with experts torch_mm and dispatcher torch
    9   refused by rule 9: what runs as a graph does not fit the rest
    X   refused by rule 10: FP8 without a TransformerEngine backend
"""

import itertools
import sys

ATTN = ["te", "sdpa", "flex", "eager", "tilelang", "cudnn", "magi"]
LINEAR = ["torch", "te", "quack"]
RMS_NORM = ["torch", "torch_fp32", "te", "quack"]
TE_FP8 = [None, "current"]
CUDA_GRAPH = [[], ["attn"], ["te_dpa"]]
EXPERTS = ["torch", "torch_mm", "torch_mm_mxfp8", "gmm", "te"]
DISPATCHER = ["torch", "deepep", "uccl_ep", "hybridep", "mok"]


class Refused(Exception):
    pass


def validate(c):
    """Changes the dictionary as the rules say; raises Refused with the rule's character."""
    rewritten = False
    if c["rope"] == "quack" and c["rope_fusion"]:  # 1
        c["rope_fusion"] = False
    c["rope_fusion"] = False  # 2
    # 3 to 6 convert and check single fields; 7 forgets enable_deepep
    if c["experts"] in ("te", "gmm") and c["dispatcher"] not in ("deepep", "hybridep", "uccl_ep", "mok"):  # 8
        c["experts"], c["dispatcher"] = "torch_mm", "torch"
        rewritten = True
    graph = c["cuda_graph"]
    if "attn" in graph or "te_dpa" in graph:  # 9
        if c["attn"] != "te":
            raise Refused("9")
        if "attn" in graph and not (c["linear"] == "torch" and c["rms_norm"] == "torch" and not c["rope_fusion"]):
            raise Refused("9")
    if c["te_fp8"] is not None and c["linear"] != "te" and c["experts"] != "te":  # 10
        raise Refused("X")
    return rewritten


def outcome(cuda_graph, te_fp8, linear, attn, rms_norm, experts, dispatcher):
    c = dict(attn=attn, linear=linear, rms_norm=rms_norm, te_fp8=te_fp8, cuda_graph=cuda_graph, experts=experts, dispatcher=dispatcher,
             rope="torch", rope_fusion=True)
    before = (experts, dispatcher)
    try:
        rewritten = validate(c)
    except Refused as refused:
        return str(refused)
    assert rewritten == ((c["experts"], c["dispatcher"]) != before)
    return "t" if rewritten else "."


def write(path):
    patterns = ["".join(outcome(*outer, *inner) for inner in itertools.product(EXPERTS, DISPATCHER))
                for outer in itertools.product(CUDA_GRAPH, TE_FP8, LINEAR, ATTN, RMS_NORM)]
    with open(path, "w", encoding="ascii", newline="\n") as file:
        for pattern, run in itertools.groupby(patterns):
            file.write(f"{len(list(run))} {pattern}\n")


if __name__ == "__main__":
    write(sys.argv[1])
