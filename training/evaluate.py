"""Measures an exported checkpoint on the suites, with rounded weights and caches and with selection.

    python evaluate.py --checkpoint models/demo --out results.json [--tasks add,copy] [--limit 10]

`forced`: every token of the expected completion (thinking included) is the argmax: the same as greedy
decoding giving exactly that text. `free`: greedy decoding for real, only the answer after the thinking
counts. Drafts: the model's own greedy stories and JSON are replayed with the DSpark stages.
"""

import argparse
import base64
import glob
import gzip
import json
import zlib

import numpy as np
import torch

import checkpoint
import config as configs
import data
from chat import IMAGE, render
from draft import draft_blocks, greedy_chain, stage_contexts
from runtime import Runtime

FREE = ["add", "sub", "mul", "copy", "reverse", "sort", "json", "tool_call", "tool_result", "fact", "image", "talk", "retrieval_250"]


def read_png(data_url):
    """Pixels of the pictures that draw.png writes (8-bit RGB, filter 0)."""
    body = base64.b64decode(data_url.split(",", 1)[1])
    idat = body[body.index(b"IDAT") + 4:]
    rows = np.frombuffer(zlib.decompressobj().decompress(idat), np.uint8).reshape(48, 1 + 48 * 3)
    return rows[:, 1:].reshape(48, 48, 3)


def document(rt, item, answer):
    """(ids, flags, pictures) of the prompt alone, or with the expected completion."""
    messages, pictures = [], []
    for message in item["messages"]:
        content = message["content"]
        if isinstance(content, list):
            pictures = [read_png(content[0]["image_url"]["url"])]
            content = IMAGE + content[1]["text"]
        messages.append({**message, "content": content})
    if answer:
        expected = item["expected"]
        call = item["score"] == "tool_call"
        messages.append(dict(role="assistant", content="" if call else expected, reasoning=item.get("reasoning", "")))
        if call:
            messages[-1]["tool_calls"] = [expected]
    parts = render(messages, item["thinking"], item.get("effort"), item.get("tools"), item.get("response_format") == "json_object", generate=not answer)
    ids, flags = rt.encoder.parts(parts)
    if answer:  # only the last assistant message counts
        prompt = len(rt.encoder.parts(render(messages[:-1], item["thinking"], item.get("effort"), item.get("tools"),
                                             item.get("response_format") == "json_object", generate=True))[0])
        flags = [False] * prompt + flags[prompt:]
    return ids, flags, pictures


def right(rt, item, ids):
    """Scores a free completion as models/demo/eval/README.md says."""
    text = rt.encoder.decode(ids)
    if not text.endswith("<｜end▁of▁sentence｜>"):
        return False
    text = text.removesuffix("<｜end▁of▁sentence｜>").split("</think>")[-1].strip()
    if item["score"] == "json":
        try:
            return json.loads(text) == json.loads(item["expected"])
        except ValueError:
            return False
    if item["score"] == "tool_call":
        from chat import tool_calls_text
        return text == tool_calls_text([item["expected"]]).strip()
    return text == item["expected"]


@torch.no_grad()
def drafts(rt, p, documents):
    """Replays decoding of the documents' answers with drafts: accepted per verification, and the confidence's calibration."""
    c, size = rt.config, rt.config.dspark_block_size
    accepted, full, sure = [], [], []
    for batch, inside in rt.rows(documents):
        b = rt.put(batch)
        _, features = rt.forward(p, b, rt.run(quant=True, select=True))
        run = rt.run(quant=True)
        contexts = stage_contexts(p, c, features, b["plan"].pos, run)
        anchors = b["where"][1:]
        ids = b["ids"].long()
        raw, base = draft_blocks(p, c, contexts, anchors, ids[anchors], b["plan"].start[anchors].long(), run)
        made, _, confidence = greedy_chain(p, c, raw, base, ids[anchors], run)
        place = {int(a): i for i, a in enumerate(anchors.cpu())}
        ids, made, probability = ids.cpu().numpy(), made.cpu().numpy(), torch.sigmoid(confidence).float().cpu().numpy()
        at = 0
        for i in inside:
            flags = np.array(documents[i][1])
            first, end = at + int(flags.argmax()), at + len(flags)
            a = first
            while a < end - 1 and a in place:
                possible = min(size, end - 1 - a)
                hit = made[place[a]][:possible] == ids[a + 1:a + 1 + possible]
                n = possible if hit.all() else int(hit.argmin())
                for j in range(min(n + 1, possible)):
                    sure.append((float(probability[place[a]][j]), bool(hit[j])))
                accepted.append(n)
                if possible == size:
                    full.append(n)
                a += n + 1
            at += len(flags) + len(flags) % 2
    sure = np.array(sure, np.float64)
    bins = [(sure[(sure[:, 0] * 10).astype(int).clip(0, 9) == k]) for k in range(10)]
    ece = sum(len(x) / len(sure) * abs(x[:, 0].mean() - x[:, 1].mean()) for x in bins if len(x))
    return dict(mean_accepted=round(float(np.mean(full)), 3), mean_accepted_all=round(float(np.mean(accepted)), 3), blocks=len(accepted),
                confidence_mean=round(float(sure[:, 0].mean()), 3), hit_mean=round(float(sure[:, 1].mean()), 3),
                confidence_error=round(float(ece), 3))


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--checkpoint", required=True)
    a.add_argument("--out", required=True)
    a.add_argument("--tasks", default="")
    a.add_argument("--limit", type=int, default=1000)
    a.add_argument("--tokens", type=int, default=65536)
    a.add_argument("--no-free", action="store_true")
    a = a.parse_args()
    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    rt = Runtime(configs.read(f"{a.checkpoint}/config.json"), f"{a.checkpoint}/tokenizer.json", device, a.tokens, dtype)
    p = {k: w.to(device) for k, w in checkpoint.load(a.checkpoint).items()}
    results, items = {}, {}
    for path in sorted(glob.glob(f"{a.checkpoint}/eval/*.jsonl.gz")):
        task = path.rsplit("/", 1)[1].split(".")[0]
        if not a.tasks or task in a.tasks.split(","):
            with gzip.open(path, "rt") as f:
                items[task] = [json.loads(line) for line in f][:a.limit]

    @torch.no_grad()
    def forced(documents, **options):
        return rt.exact(p, documents, **options)

    for task in items:
        if items[task][0]["score"] == "none":
            continue
        good = forced([document(rt, item, True) for item in items[task]], quant=True, select=True)
        results[task] = dict(n=len(good), forced=round(float(good.mean()), 4))
        if "depths" in items[task][0]:
            results[task]["by_depth"] = [round(float(good[d::10].mean()), 3) for d in range(10)]
        print(task, results[task], flush=True)
        if cuda:
            plain = forced([document(rt, item, True) for item in items[task]], quant=False, select=True)
            results[task]["unrounded_caches"] = round(float(plain.mean()), 4)
    if not a.no_free:
        free = [(task, item) for task in FREE if task in items for item in items[task][:60]]
        longest = 100
        prompts = [document(rt, item, False) for _, item in free]
        made = rt.generate(p, [(ids, pictures) for ids, _, pictures in prompts], longest, quant=True, select=False)
        for task in FREE:
            if task in items:
                marks = [right(rt, item, ids) for (t, item), ids in zip(free, made) if t == task]
                results[task]["free"] = round(float(np.mean(marks)), 4)
        own = [item for task in ("story", "json") for item in items.get(task, [])]
        if own:
            prompts = [document(rt, item, False) for item in own]
            made = rt.generate(p, [(ids, pictures) for ids, _, pictures in prompts], longest, quant=True, select=False)
            texts = {"story": [], "json": []}
            for item, (ids, _, _), new in zip(own, prompts, made):
                texts[item["task"]].append((ids + new, [False] * len(ids) + [True] * len(new), []))
            for task, documents in texts.items():
                if documents:
                    results[f"drafts_{task}"] = drafts(rt, p, documents)
            results["samples"] = [rt.encoder.decode(new) for new in made[:4]]
    with open(a.out, "w") as f:
        json.dump(results, f, indent=1, ensure_ascii=False)
    print(json.dumps(results, ensure_ascii=False))


if __name__ == "__main__":
    main()
