"""Trains the demo model in stages; every run is bounded in time and can be continued.

    python train.py --data FOLDER --state FOLDER --out FOLDER --seconds 540 [--stage backbone|draft] [--final]

FOLDER of --data holds tokenizer.json and config.json. A run starts from --state (if it holds one) and
leaves its state and a log in --out. `backbone` walks through the phases below; `draft` trains the
DSpark stages on the frozen backbone.
"""

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

import config as configs
import data
import index
from draft import draft_blocks, heads, stage_contexts
from model import gather
from params import RATES, Weights, initial, load_state, save_state, specification
from runtime import Runtime
from rng import Rng
import tasks
from chat import render

# What is trained when. A phase ends when `gate` tasks reach their accuracy, or after `most` seconds.
POLISH = dict(add=4, sub=4, mul=4, copy=2, reverse=2, sort=4, retrieval=5, json=4, tool=3, fact=2, story=2, image=8, talk=0.5)
PHASES = [
    dict(name="short", data={}, quant=False, select=False, index=False, gate=dict(kv250=0.9, json=0.9, tool=0.9, reverse=0.9), least=40, most=300),
    dict(name="rounded", data=dict(max_retrieval=400), quant=True, select=False, index=True, gate=dict(kv250=0.97, sort=0.95), least=45, most=90),
    dict(name="1k", data=dict(max_retrieval=400, lengths=[600, 800, 1000, 1200], long_share=0.4), quant=True, select=False, index=True,
         gate=dict(kv1000=0.95), least=40, most=120),
    dict(name="4k", data=dict(max_retrieval=400, lengths=[1000, 2000, 3000, 4200], long_share=0.5), quant=True, select=False, index=True,
         gate=dict(kv4000=0.93), least=40, most=150),
    dict(name="8k", data=dict(max_retrieval=400, lengths=[1000, 4200, 6000, 8300, 8300], long_share=0.55), quant=True, select=False, index=True,
         gate=dict(kv8000=0.93), least=40, most=120),
    dict(name="polish", data=dict(mixture=POLISH, max_retrieval=400, lengths=[1000, 2000, 4200, 6000, 8300], long_share=0.25), quant=True, select=False,
         index=True, gate=dict(never=1), least=0, most=10000),
    # pictures fill half of a row; the language model follows at a small rate
    dict(name="vision", data=dict(mixture=dict(POLISH, image=90), max_retrieval=400, lengths=[1000, 4200, 9300], long_share=0.2), quant=True, select=False,
         index=True, gate=dict(never=1), least=0, most=10000, rates=dict(muon=0.003, adam=3e-4, table=1.5e-3, vision=2e-3)),
]
BACKBONE = lambda name: not name.startswith("mtp.")
DRAFT = lambda name: name.startswith("mtp.")


def backbone_step(rt, weights, b, phase):
    p, c = weights.p, rt.config
    run = rt.run(quant=phase["quant"], select=phase["select"])
    if phase["index"]:
        run.index_queries = b["queries"]
    hidden, _ = rt.forward(p, b, run)
    loss = F.cross_entropy(rt.logits(p, hidden.index_select(0, b["where"])), b["target"])
    total = loss + (index.index_loss(c, run, b["plan_used"]) if phase["index"] else 0)
    total.backward()
    return torch.stack([loss.detach(), (total - loss).detach()]), run.loads, b["image"]


def draft_step(rt, weights, b):
    """Drafts learn the backbone's own choice; confidence learns whether the draft is that choice."""
    p, c = weights.p, rt.config
    size, n, where = c.dspark_block_size, rt.n, b["where"]
    with torch.no_grad():
        hidden, features = rt.forward(p, b, rt.run(quant=True, select=False))
        best = rt.logits(p, hidden.index_select(0, where)).argmax(1)
        label = torch.full((n + size,), -1, device=rt.device, dtype=torch.long)  # the backbone's choice after each token of an answer
        label.index_copy_(0, where, best)
        ids = F.pad(b["ids"].long(), (0, size))
        at = b["anchors"]
        steps = at[:, None] + torch.arange(size, device=rt.device)               # token before draft i
        labels, previous = label[steps], ids[steps]
        same = ids[steps + 1] == labels
        valid = (labels >= 0) & torch.cat([torch.ones_like(same[:, :1]), same[:, :-1].int().cumprod(1).bool()], 1)
        plan = b["plan_used"]
    run = rt.run(quant=True)
    contexts = stage_contexts(p, c, features, plan.pos, run)
    raw, base = draft_blocks(p, c, contexts, at, ids[at], plan.start[at].long(), run)
    logits, _ = heads(p, c, raw, base, previous, run)
    loss = (F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none") * valid).sum() / valid.sum()
    with torch.no_grad():
        hit = (logits.argmax(2) == labels) & valid
        given = torch.cat([torch.ones_like(hit[:, :1]), hit[:, :-1].int().cumprod(1).bool()], 1) & valid
        accepted = hit.int().cumprod(1).sum(1).float().mean()
    last = f"mtp.{c.num_nextn_predict_layers - 1}."
    with_markov = torch.cat([raw.detach(), gather(p[last + "markov_head.embed.weight"], previous).detach()], -1)
    confidence = (with_markov @ p[last + "confidence_head.proj.weight"].t())[..., 0]
    sure = (F.binary_cross_entropy_with_logits(confidence, hit.float(), reduction="none") * given).sum() / given.sum()
    (loss + sure).backward()
    error = ((torch.sigmoid(confidence.detach()) - hit.float()) * given).sum() / given.sum()
    return torch.stack([loss.detach(), accepted, error]), run.loads, torch.zeros(n, dtype=torch.bool, device=rt.device)


def own_text(rt, weights, rows, seed):
    """Packed rows of stories that the model wrote itself (greedy), as training text for the drafts."""
    rng, prompts = Rng(seed), []
    while len(prompts) < rows * rt.n // 160:
        made = tasks.example(rng.pick(["story", "story", "story", "json"]), rng)
        thinking = rng.chance(30)
        parts = render([dict(role="user", content=made["user"])], thinking, "high", generate=True)
        prompts.append((rt.encoder.parts(parts)[0], []))
    made = rt.generate(weights.p, prompts, 112, quant=True, select=False)
    documents = [(ids + new, [False] * len(ids) + [True] * len(new), []) for (ids, _), new in zip(prompts, made)]
    return [batch for batch, _ in rt.rows(documents)], [rt.encoder.decode(d[0]) for d in documents[:6]]


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--data", required=True)
    a.add_argument("--state", default="")
    a.add_argument("--out", required=True)
    a.add_argument("--seconds", type=float, default=540)
    a.add_argument("--stage", default="backbone")
    a.add_argument("--tokens", type=int, default=65536)
    a.add_argument("--workers", type=int, default=14)
    a.add_argument("--phase", type=int, default=-1)
    a.add_argument("--final", action="store_true", help="let the learning rate fall to zero over the second half of this run")
    a.add_argument("--images", type=int, default=72, help="at most so many pictures in a packed row")
    a.add_argument("--fresh-vision", action="store_true", help="start the vision tower anew")
    a.add_argument("--eval-every", type=float, default=20)
    a.add_argument("--lengths", default="250,1000,4000,8000")
    a = a.parse_args()
    began = time.time()
    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    torch.manual_seed(int(1000 * time.time()) % 100000)
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    config = configs.read(f"{a.data}/config.json")
    values, extra = load_state(a.state) if a.state else ({}, None)
    extra = extra or dict(phase=0, steps=0, runs=0, seconds=0)
    phase = extra["phase"] if a.phase < 0 else a.phase
    data.MAX_IMAGES = a.images
    if a.fresh_vision:
        generator = torch.Generator().manual_seed(7)
        values.update({name: initial(name, shape, how, config, generator) for name, (shape, how, kind) in specification(config).items() if kind == "vision"})
    loader = data.Loader(f"{a.data}/tokenizer.json", a.tokens, 100 + extra["runs"], a.workers, [ph["data"] for ph in PHASES], phase)
    rt = Runtime(config, f"{a.data}/tokenizer.json", device, a.tokens, dtype)
    weights = Weights(config, device, dtype, values=values or None)
    weights.reset(BACKBONE if a.stage == "backbone" else DRAFT)
    suite = rt.suite(40 if cuda else 2, [int(l) for l in a.lengths.split(",")])
    log = open(f"{a.out}/log.jsonl", "a")
    phase_began = last_eval = time.time()
    step, losses, own, accuracy, graph_of, replay = 0, [], [], {}, None, None

    def note(**entry):
        entry.update(run=extra["runs"], t=round(time.time() - began, 1), step=extra["steps"] + step, phase=PHASES[phase]["name"], stage=a.stage)
        print(json.dumps(entry), flush=True)
        log.write(json.dumps(entry) + "\n")
        log.flush()

    if a.stage == "draft":
        phase = len(PHASES) - 1
        loader.phase.value = 1
        weights.refresh(True)
        own, samples = own_text(rt, weights, 4 if cuda else 1, 1000 + extra["runs"])
        note(samples=samples)
    while time.time() - began < a.seconds:
        now = PHASES[phase]
        left = (a.seconds - (time.time() - began)) / a.seconds
        scale = min(1, (step + 1) / 60) * (min(1, left / 0.5) if a.final else 1)
        if a.stage == "backbone":
            tensors, work = rt.host(loader.next()), phase
        else:
            tensors, work = rt.host(own[step // 2 % len(own)] if step % 2 else loader.next()), "draft"
            tensors["anchors"] = torch.from_numpy(rt.random.choice(tensors["where"].numpy(), 8192 if cuda else 32))
        weights.set(scale)
        if graph_of != work:  # capture runs the step twice on this batch
            quant = now["quant"] or work == "draft"
            weights.refresh(quant)

            def whole_step(b):
                values, loads, image = draft_step(rt, weights, b) if work == "draft" else backbone_step(rt, weights, b, now)
                weights.balance(loads, image)
                weights.update(quant, RATES if work == "draft" else now.get("rates", RATES))
                return values

            replay, graph_of = rt.graph(whole_step, tensors), work
        losses.append(replay(tensors).clone())
        step += 1
        if step in (1, 2, 5, 20) or step % 100 == 0:
            recent = torch.stack(losses[-100:]).mean(0).tolist()
            note(loss=np.round(recent, 4).tolist(), scale=round(scale, 3))
        if a.stage == "backbone" and time.time() - last_eval > a.eval_every:
            weights.refresh(now["quant"])
            part = {k: v for k, v in suite.items() if not k.startswith("kv") or int(k[2:]) <= {0: 250, 1: 1000, 2: 4000, 5: 4000, 6: 1000}.get(phase, 8000)}
            accuracy = rt.score(weights.p, part, quant=now["quant"], select=now["index"])
            last_eval = time.time()
            note(accuracy=accuracy, seconds=round(time.time() - phase_began, 1))
            spent = time.time() - phase_began
            reached = all(accuracy.get(task, 0) >= value for task, value in now["gate"].items())
            if spent > now["most"] or (spent > now["least"] and reached):
                os.makedirs(a.out, exist_ok=True)
                phase += 1
                loader.phase.value = phase
                phase_began = time.time()
    loader.close()
    weights.refresh(True)
    if a.stage == "backbone":
        note(final=rt.score(weights.p, suite, quant=True, select=True))
    note(peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else 0)
    extra.update(phase=phase, steps=extra["steps"] + step, runs=extra["runs"] + 1, seconds=extra["seconds"] + time.time() - began)
    save_state(weights, a.out, extra)


if __name__ == "__main__":
    main()
