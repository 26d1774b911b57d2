"""Compares model.py in f32 with the golden checkpoints: streams, selections, logits, drafts, pictures.
    python check_goldens.py FOLDER...
"""

import json
import sys

import torch
from safetensors.torch import load_file

import checkpoint
import config as configs
from draft import draft_blocks, greedy_chain, stage_contexts
from engram import Hasher, compressed_map
from model import Plan, Run, embed, forward, vision_tower


def as_lists(mask):
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


def check(folder):
    config = configs.read(f"{folder}/config.json")
    p = checkpoint.load(folder)
    ref = load_file(f"{folder}/reference.safetensors")
    notes = {prompt["name"]: prompt for prompt in json.load(open(f"{folder}/reference.json"))["prompts"]}
    hasher = Hasher(config, compressed_map(f"{folder}/tokenizer.json"), "cpu")
    worst = {}

    def compare(what, got, want, limit):
        difference = (got.float() - want.float()).abs().max().item() if want.numel() else 0.0
        worst[what] = max(worst.get(what, 0.0), difference)
        if difference > limit:
            print(f"  {folder} {what}: {difference:.2e} over {limit:.0e}")

    for variant in ("f32", "quantized"):
        for name, note in notes.items():
            ids = ref[f"{name}.ids"]
            plan = Plan(config, torch.zeros(len(ids), dtype=torch.int64), "cpu")
            record = {}
            run = Run(quant=variant == "quantized", record=record)
            hashes = hasher(ids, torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool))
            with torch.no_grad():
                hidden, features = forward(p, config, ids, plan, hashes, run)
            logits = hidden @ p["head.weight"].t()
            key = f"{variant}.{name}."
            stable = len(ids) if variant == "f32" else int((torch.cat([ref[key + "rounding_noise"], torch.tensor([1.0])]) > 1e-3).nonzero()[0])
            positions = ref[f"{name}.stream_positions"]
            keep = positions < stable
            for what, got in record.items():
                if what.startswith("streams") and key + what in ref:
                    compare(f"{variant} streams", got[positions][keep], ref[key + what][keep], 2e-3 if variant == "f32" else 2e-2)
                if what.startswith("topk"):
                    want = [set(v for v in row.tolist() if v >= 0) for row in ref[key + what]] if key + what in ref else None
                    if want is not None and as_lists(got)[:stable] != want[:stable]:
                        print(f"  {folder} {key}{what}: sets differ at", [i for i in range(stable) if as_lists(got)[i] != want[i]][:5])
                if what.startswith("candidates") and key + what in ref:
                    if not torch.equal(got[:stable].bool()[:, : ref[key + what].shape[1]], ref[key + what][:stable].bool()[:, : got.shape[1]]):
                        print(f"  {folder} {key}{what}: candidate masks differ")
            compare(f"{variant} logits", logits[:stable], ref[key + "logits"][:stable], 1e-3 if variant == "f32" else 5e-3)
            if key + "dspark.features" in ref:
                compare(f"{variant} features", features[:stable], ref[key + "dspark.features"][:stable], 2e-2)
            contexts = stage_contexts(p, config, features, plan.pos, run)
            for anchor in sorted({int(k.split(".a")[1].split(".")[0]) for k in ref if k.startswith(key + "dspark.a")}):
                if anchor > stable:
                    continue
                at = torch.tensor([anchor])
                token = ids[at] if anchor < len(ids) else logits[-1:].argmax(1)
                raw, base = draft_blocks(p, config, contexts, at, token, torch.zeros_like(at), run)
                _, draft_logits, confidence = greedy_chain(p, config, raw, base, token, run)
                d = f"{key}dspark.a{anchor}."
                compare(f"{variant} draft logits", draft_logits[0], ref[d + "draft_logits"], 1e-3 if variant == "f32" else 3e-2)
                compare(f"{variant} confidence", confidence[0], ref[d + "confidence"], 1e-3 if variant == "f32" else 3e-2)
        k = 0
        while f"vision.{k}.ids" in ref:
            ids, types = ref[f"vision.{k}.ids"], ref[f"vision.{k}.token_types"]
            grid = json.load(open(f"{folder}/reference.json"))["vision"][k]["grid_hw"]
            record, run = {}, Run(quant=variant == "quantized")
            with torch.no_grad():
                features, rows = vision_tower(p, config, ref[f"vision.{k}.patches"].flatten(1)[None], *grid, torch.float32)
                compare("vision features", features[0], ref[f"vision.{k}.features"], 1e-4)
                x = embed(p, ids, types, rows[0])
                compare("vision embeddings", x, ref[f"vision.{k}.embeddings"], 1e-4)
                plan = Plan(config, torch.zeros(len(ids), dtype=torch.int64), "cpu")
                hidden, _ = forward(p, config, ids, plan, hasher(ids, torch.zeros_like(ids), types >= 0), run, image=types >= 0, embeddings=x)
            compare(f"vision {variant} hidden", hidden, ref[f"vision.{k}.{variant}.hidden"], 5e-3)
            k += 1
    print(folder.rstrip("/").rsplit("/", 1)[-1], {k: f"{v:.1e}" for k, v in worst.items()})


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        check(folder)
