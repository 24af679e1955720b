"""Checks and runs of the program that all parts of this folder use."""
import os
import subprocess

import torch

on_cuda = os.environ.get("TE_DEVICE", "").startswith("cuda")
failures, successes = [], []


def check(name, fine, text):
    print(f"  {'ok  ' if fine else 'FAIL'} {name}: {text}", flush=True)
    (successes if fine else failures).append(name)


def passed():
    return len(successes)


def run(*args, exact=True, env=None):
    """The program's output. env: its environment, if it is another one. exact: products of f32 are not rounded to TF32, which matters on CUDA alone."""
    args = [*args, "--exact"] if exact and on_cuda else args
    r = subprocess.run(args, capture_output=True, text=True, env=env)
    if r.returncode:
        failures.append(" ".join(args))
        print("  FAIL", " ".join(args), r.stderr.strip(), flush=True)
    return r.stdout


def error(got, want):
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def loss_of(model, ids):
    """Logits, and the sum over all ids but the first."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits, torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")
