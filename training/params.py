"""The weights, their initial values and their optimizers.

Weights of one shape live in one stacked tensor, so that an optimizer step is a few batched operations.
What the model computes with (`p`) are views of a working copy: bf16 for projections, rounded to the
stored format when `quant` is on. Gradients go to the f32 masters unchanged (straight through).
Muon drives projections and experts, AdamW the rest.
"""

import math
import re

import torch


from quant import fp8_32, fp8_weight, mxfp4_32


BETAS = (0.9, 0.98)
FLAT = ("adam", "table", "vision")
RATES = dict(muon=0.02, adam=2e-3, table=1e-2, vision=2e-3)


def specification(c):
    """name -> (shape, initial std or constant, kind); kinds: fp8, fp4, plain (Muon), adam, table, vision (AdamW, each with its rate)."""
    h, d, s = c.hidden_size, c.head_dim, c.hc_mult
    out = {"embed.weight": ((c.vocab_size, h), 0.1, "adam"), "head.weight": ((c.vocab_size, h), 0.02, "adam"), "norm.weight": ((h,), "one", "adam")}

    def projection(name, rows, cols, kind="fp8", gain=1.0):
        out[name + ".weight"] = ((rows, cols), gain * cols ** -0.5, kind)

    def block(name, experts):
        for site in ("attn", "ffn"):
            out[name + site + "_norm.weight"] = ((h,), "one", "adam")
            out[f"{name}hc_{site}_fn"] = (((2 + s) * s, s * h), 0.3 * (s * h) ** -0.5, "adam")
            out[f"{name}hc_{site}_base"] = (((2 + s) * s,), "hc", "adam")
            out[f"{name}hc_{site}_scale"] = ((3,), "tenth", "adam")
        a, f, inter = name + "attn.", name + "ffn.", c.moe_intermediate_size
        out[a + "attn_sink"] = ((c.num_attention_heads,), "zero", "adam")
        projection(a + "wq_a", c.q_lora_rank, h)
        projection(a + "wq_b", c.num_attention_heads * d, c.q_lora_rank)
        projection(a + "wkv", d, h)
        projection(a + "wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads * d // c.o_groups)
        projection(a + "wo_b", h, c.o_groups * c.o_lora_rank, gain=0.3)
        out[a + "q_norm.weight"], out[a + "kv_norm.weight"] = ((c.q_lora_rank,), "one", "adam"), ((d,), "one", "adam")
        out[f + "gate.weight"] = ((experts, h), h ** -0.5, "adam")
        out[f + "experts.w1"] = ((experts, inter, h), h ** -0.5, "fp4")
        out[f + "experts.w3"] = ((experts, inter, h), h ** -0.5, "fp4")
        out[f + "experts.w2"] = ((experts, h, inter), 0.3 * inter ** -0.5, "fp4")
        projection(f + "shared_experts.w1", inter, h)
        projection(f + "shared_experts.w3", inter, h)
        projection(f + "shared_experts.w2", h, inter, gain=0.3)

    for layer in range(c.num_hidden_layers):
        name = f"layers.{layer}."
        block(name, c.n_routed_experts)
        if layer in c.kv_source_layer_ids:
            projection(name + "attn.compressor.wkv", d, h, "plain")
            if c.compress_ratios[layer] > 1:
                projection(name + "attn.compressor.wgate", d, h, "plain", 0.3)
            out[name + "attn.compressor.norm.weight"] = ((d,), "one", "adam")
            projection(name + "attn.indexer.wk", c.index_head_dim, d, "plain")
            out[name + "attn.indexer.k_norm.weight"] = ((c.index_head_dim,), "one", "adam")
        if layer in c.index_source_layer_ids:
            projection(name + "attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            out[name + "attn.indexer.weights_proj.weight"] = ((c.index_n_heads, h), h ** -0.5, "adam")
        if layer in c.engram_layer_ids:
            columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            out[name + "engram.embed.weight"] = ((rows, c.engram_head_dim), 0.05, "table")
            projection(name + "engram.wkv", h * (s + 1), columns * c.engram_head_dim)
            out[name + "engram.q_weight"], out[name + "engram.k_weight"] = ((s, h), "one", "adam"), ((s, h), "one", "adam")
    last = c.num_nextn_predict_layers - 1
    for k in range(last + 1):
        block(f"mtp.{k}.", c.dspark_n_routed_experts)
    projection("mtp.0.main_proj", h, h * len(c.dspark_target_layer_ids))
    out["mtp.0.main_norm.weight"] = ((h,), "one", "adam")
    out[f"mtp.{last}.norm.weight"] = ((h,), "one", "adam")
    out[f"mtp.{last}.markov_head.embed.weight"] = ((c.vocab_size, c.dspark_markov_rank), 0.05, "adam")
    out[f"mtp.{last}.markov_head.head.weight"] = ((c.vocab_size, c.dspark_markov_rank), 0.05, "adam")
    out[f"mtp.{last}.confidence_head.proj.weight"] = ((1, h + c.dspark_markov_rank), 0.01, "adam")
    v = c.vision
    w, patch = v.hidden_size, 3 * v.patch_size ** 2
    projection("vision.patch_embed.proj", w, patch, "vision")
    out["vision.patch_embed.proj.bias"] = ((w,), "zero", "vision")
    for i in range(v.num_hidden_layers):
        name = f"vision.blocks.{i}."
        out[name + "norm1.weight"] = out[name + "norm2.weight"] = ((w,), "one", "vision")
        projection(name + "attn.wqkv", 3 * w, w, "vision")
        projection(name + "attn.wo", w, w, "vision", 0.3)
        projection(name + "mlp.w1", 2 * v.intermediate_size, w, "vision")
        projection(name + "mlp.w2", w, v.intermediate_size, "vision", 0.3)
        out[name + "attn.wqkv.bias"], out[name + "attn.wo.bias"] = ((3 * w,), "zero", "vision"), ((w,), "zero", "vision")
    out["vision.norm.weight"] = ((w,), "one", "vision")
    projection("aligner.w1", h, w * v.downsample_ratio ** 2, "vision")
    projection("aligner.w2", h, h, "vision", 0.3)
    out["aligner.w1.bias"] = out["aligner.w2.bias"] = ((h,), "zero", "vision")
    for name in ("image_start", "image_end", "image_newline"):
        out[name] = ((h,), 0.1, "vision")
    return out


def initial(name, shape, how, config, generator):
    if how == "one":
        return torch.ones(shape)
    if how == "zero":
        return torch.zeros(shape)
    if how == "tenth":
        return torch.full(shape, 0.1)
    if how == "hc":  # pre favours one stream, another at each site; post is 1; comb near the identity
        s = config.hc_mult
        match = re.search(r"(\d+)\.hc_(attn|ffn)", name)
        site = 2 * int(match[1]) + (match[2] == "ffn")
        pre = torch.full((s,), -2.0)
        pre[(site + 1) % s] = 2.0
        return torch.cat([pre, torch.zeros(s), 4 * torch.eye(s).flatten()])
    return torch.randn(shape, generator=generator) * how


def orthogonalize(g):
    """Newton-Schulz, five steps; g is [batch, rows, cols]."""
    x = g.to(torch.bfloat16)
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if flip else x).float()


class Weights:
    def __init__(self, config, device, dtype, seed=1, values=None):
        self.config, self.p, self.groups, self.spec = config, {}, [], specification(config)
        generator = torch.Generator().manual_seed(seed)
        start = {name: values[name] if values else initial(name, shape, how, config, generator)
                 for name, (shape, how, _) in self.spec.items()}
        stacks = {}
        for name, (shape, _, kind) in self.spec.items():
            if kind in ("fp8", "fp4", "plain"):
                stacks.setdefault((kind, shape), []).append(name)
        for (kind, shape), names in stacks.items():
            master = torch.stack([start[n] for n in names]).to(device)
            work = master.to(dtype) if device != "cpu" else master.clone()
            self._add(kind, names, master, work, [work[i] for i in range(len(names))])
        for kind in FLAT:
            names = [n for n, spec in self.spec.items() if spec[2] == kind]
            sizes = [-(-math.prod(self.spec[n][0]) // 64) * 64 for n in names]
            master, views, at = torch.zeros(sum(sizes), device=device), [], 0
            work = torch.zeros_like(master)
            for n, size in zip(names, sizes):
                flat = start[n].to(device).flatten()
                master[at:at + len(flat)] = flat
                views.append((at, len(flat)))
                at += size
            self._add(kind, names, master, work, [work[a:a + l].view(self.spec[n][0]) for n, (a, l) in zip(names, views)])
        self.biases = {}
        for name in [n.removesuffix("gate.weight") for n in self.spec if n.endswith(".ffn.gate.weight")]:
            experts = self.spec[name + "gate.weight"][0][0]
            for bias in ("gate.bias", "gate.bias_vl"):
                self.biases[name + bias] = (values[name + bias] if values else torch.zeros(experts)).to(device)
        self.p.update(self.biases)
        self.refresh(False)

    def _add(self, kind, names, master, work, views):
        grad = torch.zeros_like(work)
        leaves = []
        for name, view in zip(names, views):
            leaf = view.detach().requires_grad_()
            leaf.grad = torch.as_strided(grad, view.shape, view.stride(), view.storage_offset() - work.storage_offset())
            self.p[name] = leaf
            leaves.append(leaf)
        self.groups.append(dict(kind=kind, names=names, master=master, work=work, grad=grad, leaves=leaves))

    def reset(self, trainable=lambda name: True):
        """Fresh optimizer state. Frozen weights get no gradient, hence no update."""
        self.steps = 0
        self.knobs = torch.ones(3, device=self.groups[0]["master"].device)
        for g in self.groups:
            g["m"] = torch.zeros_like(g["master"])
            if g["kind"] in FLAT:
                g["v"] = torch.zeros_like(g["master"])
            for name, leaf in zip(g["names"], g["leaves"]):
                leaf.requires_grad_(trainable(name))
            g["active"] = any(map(trainable, g["names"]))
            g["grad"].zero_()

    def zero(self):
        for g in self.groups:
            g["grad"].zero_()

    @torch.no_grad()
    def refresh(self, quant):
        """Working copies from the masters, rounded as on disk when `quant`."""
        for g in self.groups:
            w = g["master"]
            if quant and g["kind"] == "fp8":
                w = fp8_weight(w)
            elif quant and g["kind"] == "fp4":
                w = mxfp4_32(w)
            elif quant and g["kind"] == "table":
                w = fp8_32(w.view(-1, 32)).flatten()
            g["work"].copy_(w)

    def set(self, scale):
        """Learning-rate scale and bias corrections of the next update (host side; `update` reads them on the device)."""
        self.steps += 1
        values = torch.tensor([scale, 1 - BETAS[0] ** self.steps, 1 - BETAS[1] ** self.steps])
        self.knobs.copy_(values.pin_memory() if self.knobs.is_cuda else values, non_blocking=True)

    @torch.no_grad()
    def update(self, quant, rates=RATES, clip=1.0):
        """One optimizer step and the new working copies: device operations only, so that a CUDA graph can hold it."""
        scale, correct1, correct2 = self.knobs.unbind()
        active = [g for g in self.groups if g["active"]]
        total = torch.stack([g["grad"].float().pow(2).sum() for g in active if g["kind"] in FLAT]).sum().sqrt()
        shrink = (clip / (total + 1e-6)).clamp(max=1.0)
        for g in active:
            grad = g["grad"].float()
            if g["kind"] in FLAT:
                grad = grad * shrink
                g["m"].lerp_(grad, 1 - BETAS[0])
                g["v"].lerp_(grad * grad, 1 - BETAS[1])
                hat = (g["v"] / correct2).sqrt_().add_(1e-8)
                g["master"].sub_(g["m"] / correct1 / hat * (scale * rates[g["kind"]]))
            else:
                g["m"].lerp_(grad, 0.05)
                update = orthogonalize(grad.lerp(g["m"], 0.95).flatten(0, -3)).view_as(grad)
                g["master"].sub_(update * (scale * (rates["muon"] * 0.2 * max(grad.shape[-2:]) ** 0.5)))
            g["grad"].zero_()
        self.refresh(quant)

    @torch.no_grad()
    def balance(self, loads, image, rate=0.002):
        """noaux: experts with less than the mean load get a larger bias; image tokens have their own."""
        for name, chosen in loads.items():
            count = self.biases[name + "ffn.gate.bias"].shape[0]
            load = torch.zeros(2, count, device=chosen.device)
            which = image.long()[: len(chosen), None].expand_as(chosen) * count
            load.view(-1).index_add_(0, (chosen + which).flatten(), torch.ones(chosen.numel(), device=chosen.device))
            for row, bias in enumerate(("ffn.gate.bias", "ffn.gate.bias_vl")):
                mean = load[row].mean()
                self.biases[name + bias] += rate * torch.sign(mean - load[row]) * (mean > 0)

    def values(self):
        """name -> f32 master."""
        out = {}
        for g in self.groups:
            for i, (name, leaf) in enumerate(zip(g["names"], g["leaves"])):
                if g["kind"] in FLAT:
                    offset = leaf.storage_offset()
                    out[name] = g["master"][offset:offset + leaf.numel()].view(leaf.shape)
                else:
                    out[name] = g["master"][i]
        return {**out, **self.biases}


def save_state(weights, folder, extra):
    """Masters in bf16 (small ones in f32), in files of at most 12 MB."""
    part, size, files = {}, 0, []
    for name, w in weights.values().items():
        t = w.detach().cpu()
        t = t.to(torch.bfloat16) if t.numel() > 4096 and "hc_" not in name else t
        part[name] = t.clone()
        size += t.numel() * t.element_size()
        if size > 12e6:
            files.append(part)
            part, size = {}, 0
    files.append(part)
    for i, f in enumerate(files):
        torch.save({"weights": f, "extra": extra if i == 0 else None}, f"{folder}/state-{i}.pt")


def load_state(folder):
    import glob
    values, extra = {}, None
    for path in sorted(glob.glob(f"{folder}/state-*.pt")):
        state = torch.load(path, weights_only=False)
        values.update({k: v.float() for k, v in state["weights"].items()})
        extra = state["extra"] or extra
    return values, extra
