"""Writes what this model computes for an exported checkpoint, for comparison with another engine.

    python reference.py --checkpoint models/demo --out FOLDER [--greedy 24]

reference.safetensors and reference.json: streams, selections, experts, logits, drafts and the greedy
continuation for prompts of 1, 33 and 400 tokens, in f32 without (`f32`) and with (`quantized`) cache
rounding. A second run with float64 matrix products says where rounding makes results unstable.
"""

import argparse
import json

import torch
from safetensors.torch import save_file

import checkpoint
import config as configs
import tasks
from chat import render
from draft import draft_blocks, greedy_chain, stage_contexts
from engram import Hasher, compressed_map
from data import Encoder
from model import Plan, Run, forward
from rng import Rng


def prompt_of(encoder, task, length, **options):
    """The first generated prompt of exactly so many tokens."""
    rng = Rng(length)
    while True:
        made = tasks.example(task, rng, True, **options)
        ids, _ = encoder.parts(render([dict(role="user", content=made["user"])], generate=True))
        if len(ids) == length:
            return ids


def sets(mask, k):
    """uint8 mask -> int32 [N, k], ascending, -1 where absent."""
    out = torch.full((len(mask), k), -1, dtype=torch.int32)
    for i, row in enumerate(mask):
        chosen = row.nonzero()[:, 0].to(torch.int32)
        out[i, :len(chosen)] = chosen
    return out


@torch.no_grad()
def main():
    a = argparse.ArgumentParser()
    a.add_argument("--checkpoint", required=True)
    a.add_argument("--out", required=True)
    a.add_argument("--greedy", type=int, default=24)
    a = a.parse_args()
    config, p = configs.read(f"{a.checkpoint}/config.json"), checkpoint.load(a.checkpoint)
    encoder = Encoder(f"{a.checkpoint}/tokenizer.json")
    token_map = compressed_map(f"{a.checkpoint}/tokenizer.json")
    hasher = Hasher(config, token_map, "cpu")

    def compute(ids, quant, record=None, dtype=torch.float32):
        ids = torch.tensor(ids)
        plan = Plan(config, torch.zeros(len(ids), dtype=torch.int64), "cpu")
        hashes = hasher(ids, torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool))
        run = Run(quant=quant, record=record, dtype=dtype)
        hidden, features = forward(p, config, ids, plan, hashes, run)
        return hidden, hidden.float() @ p["head.weight"].t(), features, plan, hashes

    out, notes = {"engram.token_map": torch.tensor(token_map)}, []
    for name, ids in (("p1", [0]), ("p33", prompt_of(encoder, "retrieval", 33, tokens=30)), ("p400", prompt_of(encoder, "retrieval", 400, tokens=460))):
        n = len(ids)
        positions = torch.arange(n) if n <= 64 else torch.cat([torch.arange(0, n - 1, 16), torch.tensor([n - 1])])
        out[f"{name}.ids"], out[f"{name}.stream_positions"] = torch.tensor(ids), positions
        note = dict(name=name, length=n, ids=ids, text=encoder.decode(ids))
        for variant in ("f32", "quantized"):
            key, record, quant = f"{variant}.{name}.", {}, variant == "quantized"
            hidden, logits, features, plan, hashes = compute(ids, quant, record)
            probe = compute(ids, quant, dtype=torch.float64)[1]
            noise = (probe - logits).abs().amax(1)
            out[f"{name}.engram_hash"] = hashes.transpose(0, 1).contiguous()
            for what, t in record.items():
                kind, layer = what.rsplit(".", 1)
                if kind.startswith("streams"):
                    out[key + what] = t[positions].float().contiguous()
                elif kind == "topk":
                    out[key + what] = sets(t, min(config.index_topk, max(1, t.shape[1])))
                elif kind in ("attn_out", "ffn_out"):
                    if n <= 64:
                        out[key + what] = t.float().contiguous()
                elif kind == "experts":
                    out[key + what] = t.to(torch.int32).contiguous()
                else:
                    out[key + what] = t.contiguous() if t.dtype == torch.uint8 else t.float().contiguous()
            out.update({key + "hidden": hidden.contiguous(), key + "logits": logits.contiguous(), key + "rounding_noise": noise.float(),
                        key + "dspark.features": features.contiguous()})
            unstable = (noise > 1e-3).nonzero()
            sequence, gaps, stable = list(ids), [], None
            for step in range(a.greedy):
                now = logits[-1] if step == 0 else compute(sequence, quant)[1][-1]
                best = now.topk(2)
                gaps.append(round(float(best.values[0] - best.values[1]), 5))
                sequence.append(int(best.indices[0]))
                if sequence[-1] == config.eos_token_id:
                    break
            stable = next((i for i, gap in enumerate(gaps) if gap < 0.05), len(gaps))
            blocks = []
            contexts = stage_contexts(p, config, features, plan.pos, Run(quant=quant))
            for anchor in ([] if n < 3 else sorted({2, 7, 16, n // 2, n - 1, n})):
                at = torch.tensor([anchor])
                token = torch.tensor([(ids + sequence[n:])[anchor]])
                run = Run(quant=quant)
                raw, base = draft_blocks(p, config, contexts, at, token, torch.zeros_like(at), run)
                made, draft_logits, confidence = greedy_chain(p, config, raw, base, token, run)
                d = f"{key}dspark.a{anchor}."
                out.update({d + "raw_hidden": raw[0].contiguous(), d + "base_logits": base[0].contiguous(), d + "draft_logits": draft_logits[0].contiguous(),
                            d + "confidence": confidence[0].contiguous()})
                top = draft_logits[0].topk(2).values
                blocks.append(dict(anchor_position=anchor, anchor_token=int(token), start_pos=anchor - 1, draft=made[0].tolist(),
                                   argmax_gap=[round(float(x[0] - x[1]), 5) for x in top], confidence_logits=confidence[0].tolist()))
            note[variant] = dict(greedy=sequence[n:], argmax_gap=gaps, greedy_stable_steps=stable, dspark=blocks,
                                 first_unstable_position=int(unstable[0]) if len(unstable) else n,
                                 deviation=dict(float64_matmul=dict(logits_max=float(noise.max()))))
            print(name, variant, note[variant]["first_unstable_position"], float(noise.max()), encoder.decode(sequence[n:]), flush=True)
        notes.append(note)
        save_file(out, f"{a.out}/reference.safetensors")
        with open(f"{a.out}/reference.json", "w") as f:
            json.dump(dict(checkpoint="demo", reference="training/model.py, CPU, float32", prompts=notes, variants=["quantized", "f32"],
                           engram=dict(compressed_vocab_size=config.engram_compressed_vocab_size, multipliers=[[str(m) for m in ms] for ms in hasher.multipliers],
                                       primes=[x.tolist() for x in hasher.primes], offsets=[x.tolist() for x in hasher.offsets])), f, indent=1)


if __name__ == "__main__":
    main()
