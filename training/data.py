"""From examples to packed batches: one long row of N tokens, documents at even starts.

Worker processes fill a queue; each has its own seeds, so the stream of documents is fixed by the seed
(their order over workers is not).
"""

import json
import multiprocessing as mp

import numpy as np
from tokenizers import AddedToken, Tokenizer  # noqa: F401

import draw
import tasks
from chat import IMAGE, Special, render
from rng import Rng

SYSTEMS = ["You are a helpful assistant.", "You are DeepInfer, a helpful assistant.", "Answer briefly.", "Be precise."]
SHORT = dict(add=2, sub=2, mul=2, copy=2, reverse=3, sort=3, retrieval=9, json=4, tool=4, fact=3, story=1, image=3, talk=0.5)
MAX_IMAGES = 72  # of one packed row
IMAGE_TOKENS, IMAGE_GRID = 22, 4  # start + 4 rows of 4 and a newline + end


def pick_task(rng, mixture):
    total = sum(mixture.values())
    point = rng.next() / 2**64 * total
    for task, weight in mixture.items():
        point -= weight
        if point < 0:
            return task
    return task


def messages_of(made, effort=None, thinking=False):
    """The messages of one example, with its answer."""
    think = tasks.reasoning(made, effort) if thinking else ""
    out = [dict(role="user", content=made["user"])]
    if "call" in made:
        out += [dict(role="assistant", content="", reasoning=think, tool_calls=[made["call"]]),
                dict(role="tool", content=made["result"]),
                dict(role="assistant", content=made["answer"], reasoning="I report the result." if thinking else "")]
    else:
        out.append(dict(role="assistant", content=made["answer"], reasoning=think))
    for question, answer in made.get("more", ()):
        out += [dict(role="user", content=question), dict(role="assistant", content=answer, reasoning=think)]
    return out


def conversation(rng, mixture=SHORT, max_retrieval=250, held_out=False, lengths=None):
    """Parts of one document and its pictures. 40% think; 25% have a system text; 15% have more than one turn."""
    task = pick_task(rng, mixture)
    thinking = rng.chance(40)
    effort = rng.pick(["low", "high", "high", "max"]) if thinking else None
    options = {}
    if task == "retrieval":
        tokens = rng.pick(lengths) if lengths else rng.range(30, max_retrieval)
        if lengths:
            tokens = rng.range(tokens * 7 // 10, tokens * 97 // 100)
        options = dict(tokens=tokens, turns=1 if tokens < 200 else min(24, rng.range(2, 4 + tokens // 100)))
    made = tasks.example(task, rng, held_out, **options)
    messages = messages_of(made, effort, thinking)
    pictures = [made["image"]] if "image" in made else []
    if "call" not in made and task != "retrieval" and rng.chance(15):
        for _ in range(rng.range(1, 2)):
            extra = tasks.example(rng.pick(["add", "copy", "fact", "sort", "json", "talk"]), rng, held_out)
            messages += messages_of(extra, effort, thinking)
    if rng.chance(25):
        messages.insert(0, dict(role="system", content=rng.pick(SYSTEMS)))
    return render(messages, thinking, effort, made.get("tools"), made.get("json_object", False)), pictures


class Encoder:
    """Token ids of rendered parts, as the prompt crate encodes them: plain text never becomes a special token."""

    def __init__(self, path):
        with open(path) as f:
            state = json.load(f)
        self.special = {token["content"]: token["id"] for token in state["added_tokens"]}
        self.image_id = self.special["<｜deepseek_image｜>"]
        self.full = Tokenizer.from_str(json.dumps(state))
        state["added_tokens"] = []
        self.plain = Tokenizer.from_str(json.dumps(state))

    def text(self, text):
        return self.plain.encode(text, add_special_tokens=False).ids

    def parts(self, parts):
        """(ids, answer flags). An image marker becomes its span of image ids."""
        ids, flags = [], []
        for part, answer in parts:
            if isinstance(part, Special):
                new = [self.image_id] * IMAGE_TOKENS if part == IMAGE else [self.special[part]]
            else:
                new = self.text(part)
            ids += new
            flags += [answer] * len(new)
        return ids, flags

    def decode(self, ids):
        return self.full.decode(list(map(int, ids)), skip_special_tokens=False)


def span_types():
    """0 start, 1 content, 2 newline, 3 end, over the tokens of one picture."""
    return [0] + ([1] * IMAGE_GRID + [2]) * IMAGE_GRID + [3]


def pack(documents, n):
    """documents: (ids, flags, pictures). Returns a dict of arrays of length n; -1 in `types` is text."""
    ids = np.full(n, 2, np.int32)
    start = np.zeros(n, np.int32)
    answer = np.zeros(n, bool)
    types = np.full(n, -1, np.int8)
    pixels, at = [], 0
    for tokens, flags, pictures in documents:
        end = at + len(tokens)
        assert end <= n
        ids[at:end], answer[at:end] = tokens, flags
        if pictures:
            where = np.flatnonzero(ids[at:end] == pack.image_id) + at
            types[where] = np.tile(span_types(), len(pictures))
            pixels += pictures
        stop = end + end % 2
        start[at:stop] = at
        at = stop
    # what is left over: pad documents of at most 64 tokens
    for p in range(at, n, 64):
        start[p:p + 64] = p
    patches = np.stack([draw.patches(p) for p in pixels]) if pixels else np.zeros((0, 144, 48), np.float32)
    return dict(ids=ids, start=start, answer=answer, types=types, patches=patches.astype(np.float16))


def batch(rng, encoder, n, lengths=None, long_share=0.5, mixture=SHORT, **options):
    """Documents until the row is full: first long retrieval documents (if `lengths`), then the mixture."""
    pack.image_id = encoder.image_id
    documents, room, misses, images = [], n, 0, 0
    while room > 64 and misses < 6:
        if lengths and room > n * (1 - long_share):
            parts, pictures = conversation(rng, {"retrieval": 1}, lengths=lengths)
        else:
            parts, pictures = conversation(rng, mixture, **options)
        if pictures and images == MAX_IMAGES:
            continue
        ids, flags = encoder.parts(parts)
        size = len(ids) + len(ids) % 2
        if size > room:
            misses += 1
            lengths = None
            continue
        documents.append((ids, flags, pictures))
        images += len(pictures)
        room -= size
    return pack(documents, n)


def _work(path, n, seed, phases, phase, queue):
    import os
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder, rng = Encoder(path), Rng(seed)
    while True:
        current = phase.value
        queue.put((current, batch(rng, encoder, n, **phases[current])))


class Loader:
    """`phases` are options of `batch`; `phase.value` chooses, and batches of an earlier phase are dropped."""

    def __init__(self, path, n, seed, workers, phases, first=0):
        context = mp.get_context("fork")
        self.queue, self.phase = context.Queue(maxsize=2 * workers), context.Value("i", first)
        self.workers = [context.Process(target=_work, args=(path, n, seed * 1000003 + w, phases, self.phase, self.queue), daemon=True)
                        for w in range(workers)]
        for worker in self.workers:
            worker.start()

    def next(self):
        while True:
            phase, made = self.queue.get()
            if phase == self.phase.value:
                return made

    def close(self):
        for worker in self.workers:
            worker.terminate()
