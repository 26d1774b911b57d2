"""Batches on the device, forward passes over packed rows, greedy generation by recomputation, exact-match scoring."""

import numpy as np
import torch

import data
import tasks
from chat import render
from engram import Hasher, compressed_map
from model import Plan, Run, document_ends, embed, forward, vision_tower
from rng import Rng


class Runtime:
    def __init__(self, config, tokenizer, device, n, dtype):
        self.config, self.device, self.n, self.dtype = config, device, n, dtype
        self.encoder = data.Encoder(tokenizer)
        data.pack.image_id = self.encoder.image_id
        self.random = np.random.default_rng(0)
        self.hasher = Hasher(config, compressed_map(tokenizer), device)

    def host(self, batch):
        """Tensors of fixed shapes in pinned memory: answers and pictures are padded (a padded answer has target -100)."""
        answers, images = self.n * 3 // 8, data.MAX_IMAGES
        after = np.flatnonzero(batch["answer"])[:answers]
        where, target = np.zeros(answers, np.int64), np.full(answers, -100, np.int64)
        where[:len(after)], target[:len(after)] = after - 1, batch["ids"][after]
        where[len(after):] = after[np.arange(answers - len(after)) % max(1, len(after))] - 1 if len(after) else 0
        content = np.full(images * 16, self.n, np.int64)
        real = np.flatnonzero(batch["types"] == 1)
        content[:len(real)] = real
        patches = np.zeros((images, 144, 48), np.float16)
        patches[:len(batch["patches"])] = batch["patches"]
        arrays = dict(ids=batch["ids"], start=batch["start"], end=document_ends(batch["start"]).astype(np.int32), types=batch["types"],
                      where=where, target=target, content=content, patches=patches, queries=np.concatenate([self.random.choice(where, 96), self.random.integers(0, self.n, 32)]))
        tensors = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()}
        return {k: t.pin_memory() for k, t in tensors.items()} if self.device == "cuda" else tensors

    def put(self, batch):
        """A batch on the device, with the host's knowledge of the documents (needed for selection)."""
        b = {k: t.to(self.device) for k, t in self.host(batch).items()}
        b["plan"] = Plan(self.config, batch["start"], self.device)
        if not len(batch["patches"]):
            b["patches"] = b["patches"][:0]
        after = np.flatnonzero(batch["answer"])
        b["where"], b["target"] = torch.from_numpy(after - 1).to(self.device), b["ids"][torch.from_numpy(after).to(self.device)].long()
        return b

    def run(self, **options):
        return Run(dtype=self.dtype, **options)

    def forward(self, p, b, run):
        plan = b.get("plan") or Plan(self.config, np.zeros(self.n), self.device, (b["start"], b["end"]))
        b["plan_used"], b["image"] = plan, b["types"] >= 0
        rows = None
        if len(b["patches"]):
            rows = vision_tower(p, self.config, b["patches"].float(), 12, 12, self.dtype)[1]
        x = embed(p, b["ids"], b["types"].long(), rows, b["content"])
        hashes = self.hasher(b["ids"], plan.start, b["image"])
        return forward(p, self.config, b["ids"], plan, hashes, run, image=b["image"], embeddings=x)

    def graph(self, function, sample):
        """`function(static batch)` as a CUDA graph: returns call(host tensors) -> its outputs (overwritten by the next call)."""
        static = {k: t.to(self.device) for k, t in sample.items()}
        if self.device != "cuda":
            return lambda tensors: function(dict(tensors))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function(dict(static))
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(captured):
                out = function(dict(static))
        except RuntimeError as error:
            print("no CUDA graph:", str(error)[:300], flush=True)
            return lambda tensors: function({k: t.to(self.device) for k, t in tensors.items()})

        def call(tensors):
            for k, t in tensors.items():
                static[k].copy_(t, non_blocking=True)
            captured.replay()
            return out
        return call

    def logits(self, p, hidden):
        return (hidden.to(self.dtype) @ p["head.weight"].to(self.dtype).t()).float()

    def rows(self, documents):
        """Packs (ids, flags, pictures) documents into rows; yields (batch, indices of the documents in it)."""
        row, inside, used = [], [], 0
        for i, document in enumerate(documents):
            size = len(document[0]) + len(document[0]) % 2
            if used + size > self.n:
                yield data.pack(row, self.n), inside
                row, inside, used = [], [], 0
            row.append(document)
            inside.append(i)
            used += size
        if row:
            yield data.pack(row, self.n), inside

    def exact(self, p, documents, **options):
        """For each document: is every answer token the argmax? Equal to greedy decoding giving exactly the answer."""
        good = np.zeros(len(documents), bool)
        for batch, inside in self.rows(documents):
            b = self.put(batch)
            hidden, _ = self.forward(p, b, self.run(**options))
            right = torch.zeros(self.n, dtype=torch.bool, device=self.device)
            right[b["where"] + 1] = self.logits(p, hidden[b["where"]].detach()).argmax(1) == b["target"]
            right = right.cpu().numpy()
            at = 0
            for i in inside:
                ids, flags = documents[i][0], np.array(documents[i][1])
                good[i] = bool(right[at:at + len(ids)][flags].all())
                at += len(ids) + len(ids) % 2
        return good

    def generate(self, p, prompts, new, **options):
        """Greedy continuation of (ids, pictures) prompts, whole rows recomputed for every token: slow but simple."""
        def best(b):
            with torch.no_grad():
                hidden, _ = self.forward(p, b, self.run(**options))
                return self.logits(p, hidden.index_select(0, b["where"])).argmax(1).to(torch.int32)

        out, step_graph = [None] * len(prompts), None
        slots = [(ids + [2] * new, [False] * (len(ids) + new), pictures) for ids, pictures in prompts]
        for batch, inside in self.rows(slots):
            lengths = np.array([len(prompts[i][0]) for i in inside])
            begins = np.concatenate([[0], np.cumsum([len(slots[i][0]) + len(slots[i][0]) % 2 for i in inside])[:-1]]).astype(np.int64)
            b = self.host(batch)
            if options.get("select", True):  # selection needs the host's knowledge: no graph
                plan = Plan(self.config, batch["start"], self.device)
                step_graph = lambda tensors: best({**tensors, "plan": plan})
                b = {k: t.to(self.device) for k, t in b.items()}
            elif step_graph is None:
                step_graph = self.graph(best, b)
            b = {k: t.to(self.device) for k, t in b.items()}
            at, count = torch.from_numpy(begins + lengths).to(self.device), len(inside)
            done = torch.zeros(count, dtype=torch.bool, device=self.device)
            for step in range(new):
                b["where"][:count] = at + step - 1
                token = torch.where(done, 2, step_graph(b)[:count])
                b["ids"][at + step] = token
                done = done | (token == 1)
                if step % 8 == 7 and bool(done.all()):
                    break
            ids = b["ids"].cpu().numpy()
            for i, begin, length in zip(inside, begins, lengths):
                made = ids[begin + length:begin + length + new].tolist()
                out[i] = made[:made.index(1) + 1] if 1 in made else made
        return out

    def document(self, made, thinking=False, effort=None):
        """(ids, flags, pictures) of one example."""
        parts = render(data.messages_of(made, effort, thinking), thinking, effort, made.get("tools"), made.get("json_object", False))
        return (*self.encoder.parts(parts), [made["image"]] if "image" in made else [])

    def suite(self, count, lengths, seed=9):
        """task -> held-out documents; half of them think."""
        rng, out = Rng(seed), {}
        for task in tasks.GENERATORS:
            if task in ("story", "retrieval"):
                continue
            out[task] = [self.document(tasks.example(task, rng, True), i % 2 == 1, rng.pick(["low", "high", "max"])) for i in range(count)]
        for length in lengths:
            out[f"kv{length}"] = [self.document(tasks.example("retrieval", rng, True, tokens=rng.range(length * 3 // 4, length * 95 // 100), depth=i % 10),
                                                i % 2 == 1, "high") for i in range(count)]
        return out

    def score(self, p, suite, **options):
        flat = [(task, document) for task, documents in suite.items() for document in documents]
        good = self.exact(p, [document for _, document in flat], **options)
        return {task: round(float(np.mean([g for (t, _), g in zip(flat, good) if t == task])), 3) for task in suite}
