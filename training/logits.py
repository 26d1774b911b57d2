"""Writes a few logits of an exported checkpoint, small enough for the repository.

    python logits.py --checkpoint ../models/demo --out ../crates/engine/tests/files/demo-logits.safetensors

For each of three prompts, with the dequantized weights and caches that are not rounded, in f32:
NAME.ids, NAME.positions, NAME.logits (of those positions), NAME.top (their ten best tokens, best
first), NAME.greedy (up to the end of the turn, the whole text computed again for each token) and
NAME.gaps (between the two best logits of each greedy step).
"""

import argparse

import torch
from safetensors.torch import save_file

import checkpoint
import config as configs
from chat import render
from data import Encoder
from engram import Hasher, compressed_map
from model import Plan, Run, forward

# User's message, and whether the answer begins with thinking.
PROMPTS = {"sum": ("What is 2305 + 871?", True), "copy": ("Repeat: k q b x m t w", False), "talk": ("Who are you?", False)}


@torch.no_grad()
def main():
    a = argparse.ArgumentParser()
    a.add_argument("--checkpoint", required=True)
    a.add_argument("--out", required=True)
    a.add_argument("--most", type=int, default=64)
    a = a.parse_args()
    config, weights = configs.read(f"{a.checkpoint}/config.json"), checkpoint.load(a.checkpoint)
    encoder = Encoder(f"{a.checkpoint}/tokenizer.json")
    hasher = Hasher(config, compressed_map(f"{a.checkpoint}/tokenizer.json"), "cpu")

    def logits_of(ids):
        ids = torch.tensor(ids)
        plan = Plan(config, torch.zeros(len(ids), dtype=torch.int64), "cpu")
        hashes = hasher(ids, torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool))
        hidden, _ = forward(weights, config, ids, plan, hashes, Run(quant=False))
        return hidden.float() @ weights["head.weight"].t()

    out = {}
    for name, (user, thinking) in PROMPTS.items():
        text = render([dict(role="user", content=user)], thinking=thinking, generate=True)
        ids, _ = encoder.parts(text)
        logits = logits_of(ids)
        positions = torch.tensor([0, len(ids) // 3, 2 * len(ids) // 3, len(ids) - 1])
        text, gaps = list(ids), []
        while len(gaps) < a.most and text[-1] != config.eos_token_id:
            best = logits_of(text)[-1].topk(2)
            text.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
        kept = logits[positions].contiguous()
        out.update({
            f"{name}.ids": torch.tensor(ids), f"{name}.positions": positions, f"{name}.logits": kept,
            f"{name}.top": kept.topk(10).indices.contiguous(),
            f"{name}.greedy": torch.tensor(text[len(ids):]), f"{name}.gaps": torch.tensor(gaps),
        })
        print(name, len(ids), encoder.decode(text[len(ids):]), f"smallest gap {min(gaps):.4f}", flush=True)
    save_file(out, a.out)


if __name__ == "__main__":
    main()
