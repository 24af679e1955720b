"""check_onnx.py: the files of te_onnx_export in another runtime.

    python check_onnx.py build/export_onnx FOLDER [WORD ...]

Runs export_onnx, which writes modules as ONNX files and what te.h computes with them at batches and lengths that no export has seen; then onnx checks each file,
onnxruntime runs it on the CPU, and the outputs are compared.
"""

import glob
import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
from safetensors.numpy import load_file

# Of the largest magnitude of an output. Both sides round every value where the other does, so only the last bit of f32 differs at first; where it decides a rounding
# the results are apart by one step of the narrower format, which later products spread:
TOLERANCE = {
    "f32": 5e-6,  # sums of a few hundred products in another order
    "bf16": 1.5e-2,  # a step is 2^-8 of a value; te.h's attention also rounds to bfloat16 what the graph keeps in f32
    "f16": 3e-3,  # a step is 2^-11
    # a last bit of f32 that decides a rounding to E4M3 moves a value by up to 2^-3; that is rare, and seen where much follows
    "delayed": 5e-2,
    "delayed_dpa": 5e-2,
    "current": 5e-2,
    "stored_current": 5e-2,
    # bfloat16 times a scale lies halfway between two codes often, where x * scale and x / (1 / scale) go apart
    "delayed_bf16": 8e-2,
    # the file's activations are not rounded to codes, te.h's are: an error of up to 2^-4 of a value, of either sign
    "block": 1.5e-1,
    "mxfp8": 1.5e-1,
    "stored_mxfp8": 1.5e-1,
    "nvfp4": 5e-1,  # the same of E2M1: up to 2^-2
    # neither side quantizes activations, and the weights are the same: as bf16
    "decoded_current": 1.5e-2,
    "decoded_block": 1.5e-2,
    "decoded_mxfp8": 1.5e-2,
    "decoded_nvfp4": 1.5e-2,
}


def without_16_bits(model):
    """onnxruntime's Python bindings have no bfloat16: inputs and outputs of 16 bits become f32, with a cast inside."""
    graph, wide = model.graph, onnx.TensorProto.FLOAT
    narrow = (onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16)
    first, last = [], []
    for value in graph.input:
        kind = value.type.tensor_type.elem_type
        if kind in narrow:
            inner = value.name + ":narrow"
            for node in graph.node:
                for i, name in enumerate(node.input):
                    if name == value.name:
                        node.input[i] = inner
            first.append(onnx.helper.make_node("Cast", [value.name], [inner], to=kind))
            value.type.tensor_type.elem_type = wide
    for value in graph.output:
        if value.type.tensor_type.elem_type in narrow:
            inner = value.name + ":narrow"
            for node in graph.node:
                for i, name in enumerate(node.output):
                    if name == value.name:
                        node.output[i] = inner
            last.append(onnx.helper.make_node("Cast", [inner], [value.name], to=wide))
            value.type.tensor_type.elem_type = wide
    nodes = first + list(graph.node) + last
    del graph.node[:]
    graph.node.extend(nodes)
    return model


KINDS = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(uint8)": np.uint8}


def weights_once(model, name):
    """No parameter is there twice: neither by its name nor by its bytes."""
    names = [x.name for x in model.graph.initializer]
    assert len(names) == len(set(names)), f"{name}: an initializer is there twice"
    large = [x.raw_data for x in model.graph.initializer if len(x.raw_data) >= 2048]
    assert len(large) == len(set(large)), f"{name}: the bytes of a weight are there twice"


def check(path, mode):
    """The largest error of all outputs, of the largest magnitude."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    weights_once(model, path)
    opset = model.opset_import[0].version
    assert opset >= 19, f"{path}: opset {opset}"
    float8 = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert bool(float8) == (mode in ("delayed", "delayed_bf16", "delayed_dpa", "current", "stored_current")), f"{path}: {len(float8)} QuantizeLinear"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(without_16_bits(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for i in (1, 2):
        data = load_file(f"{path[:-5]}.{i}.safetensors")
        feed = {x.name: data["in." + x.name].astype(KINDS[x.type]) for x in session.get_inputs()}
        for output, got in zip(session.get_outputs(), session.run(None, feed)):
            want = data["out." + output.name]
            assert got.shape == want.shape, f"{path}: {output.name} is {got.shape}, and {want.shape} in te.h"
            assert np.isfinite(got).all(), f"{path}: {output.name} is not finite"
            worst = max(worst, float(np.abs(got.astype(np.float64) - want).max() / max(np.abs(want).max(), 1e-30)))
    return worst


def main():
    program, folder, words = sys.argv[1], sys.argv[2], sys.argv[3:]
    os.makedirs(folder, exist_ok=True)
    for old in glob.glob(os.path.join(folder, "*.onnx")) + glob.glob(os.path.join(folder, "*.safetensors")):
        os.remove(old)
    subprocess.run([program, folder, *words], check=True, stdout=subprocess.DEVNULL)
    files = sorted(glob.glob(os.path.join(folder, "*.onnx")))
    failed = 0
    most = {}
    for path in files:
        name = os.path.basename(path)[:-5]
        mode = name.split(".")[1]
        try:
            error = check(path, mode)
            wrong = "" if error <= TOLERANCE[mode] else f"{error:.2e} of the largest; {TOLERANCE[mode]:.1e} is allowed"
            most[mode] = max(most.get(mode, 0.0), error)
        except Exception as e:  # a file that is no model, or that the runtime refuses, fails alone
            wrong = f"{type(e).__name__}: {e}"
        if wrong:
            print(f"FAIL  {name}: {wrong}")
            failed += 1
    print("largest errors: " + ", ".join(f"{mode} {error:.1e}" for mode, error in most.items()))
    print(f"{len(files) - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed or not files else 0


if __name__ == "__main__":
    sys.exit(main())
