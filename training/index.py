"""The index: scores, top-k selection, candidate blocks, and the loss that teaches it.

Masks are uint8 [N, rows of the longest document], in the row numbering of each token's own document.
Ties go to the lower row. Work is done in tiles of queries, so that no score matrix is ever whole.
"""

import torch

TILE = 4096


def index_scores(q, keys, w):
    """[queries, rows]: sum over heads of relu(q . k) * w."""
    s = torch.einsum("nhd,rd->hnr", q, keys.to(q.dtype)).relu()
    return (s.float() * w.t()[:, :, None]).sum(0)


def _tiles(plan, ratio):
    """(first query, query end, first row, row end, rows of the longest document) of each tile."""
    for a in range(0, plan.n, TILE):
        b = min(a + TILE, plan.n)
        start, end = plan.host_start[a:b], plan.host_end[a:b]
        rows = plan.n // ratio
        yield a, b, int(start[0]) // ratio, min(rows, int(end[-1]) // ratio), int((end - start).max()) // ratio


def _order(scores, columns):
    """int64 keys that sort by score and, at equal scores, put the lower column first."""
    bits = (scores + 0.0).contiguous().view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (bits << 32) + (0x7FFFFFFF - columns.to(torch.int64))


def _local_scores(q, keys, w, plan, ratio, tile):
    """(scores [tile, local rows], visible) with rows counted from the document's first."""
    a, b, r0, r1, width = tile
    s = index_scores(q[a:b].float(), keys[r0:r1].float(), w[a:b])
    first, end = plan.rows(len(keys))
    local = torch.arange(width, device=q.device)
    at = (first[a:b].long() - r0)[:, None] + local[None]
    seen = local[None] < (end - first)[a:b, None]
    return s.gather(1, at.clamp(0, max(r1 - r0 - 1, 0))), seen


def select(q, keys, w, plan, top, candidates):
    """uint8 mask of the best `top` visible rows (inside `candidates`, if given)."""
    ratio = plan.ratios[len(keys)]
    width = max(1, max(t[4] for t in _tiles(plan, ratio)))
    out = torch.zeros(plan.n, width, dtype=torch.uint8, device=q.device)
    for tile in _tiles(plan, ratio):
        a, b, _, _, here = tile
        if not here:
            continue
        s, seen = _local_scores(q, keys, w, plan, ratio, tile)
        if candidates is not None:
            seen = seen & candidates[a:b, :here].bool()
        if here <= top:
            out[a:b, :here] = seen
            continue
        order = torch.where(seen, _order(s, torch.arange(here, device=q.device)[None]), torch.iinfo(torch.int64).min)
        best = order.topk(top, 1)
        out[a:b, :here].scatter_(1, best.indices, (best.values > torch.iinfo(torch.int64).min).to(torch.uint8))
    return out


def block_candidates(q, keys, w, plan, top, size):
    """uint8 mask of the visible rows in the best `top` blocks; the block of the last visible row is always one."""
    ratio = plan.ratios[len(keys)]
    width = max(1, max(t[4] for t in _tiles(plan, ratio)))
    out = torch.zeros(plan.n, width, dtype=torch.uint8, device=q.device)
    first, end = plan.rows(len(keys))
    for tile in _tiles(plan, ratio):
        a, b, _, _, here = tile
        if not here:
            continue
        s, seen = _local_scores(q, keys, w, plan, ratio, tile)
        blocks = -(-here // size)
        if blocks <= top:
            out[a:b, :here] = seen
            continue
        s = torch.where(seen, s, float("-inf"))
        s = torch.nn.functional.pad(s, (0, blocks * size - here), value=float("-inf")).view(b - a, blocks, size).amax(2)
        last = ((end - first)[a:b].long() - 1).clamp(min=0) // size
        s.scatter_(1, last[:, None], float("inf"))
        best = _order(s, torch.arange(blocks, device=q.device)[None]).topk(top, 1).indices
        keep = torch.zeros(b - a, blocks, dtype=torch.bool, device=q.device).scatter_(1, best, True)
        out[a:b, :here] = keep.repeat_interleave(size, 1)[:, :here] & seen
    return out


@torch.no_grad()
def index_targets(q, win, rows, sink, plan, chosen):
    """Attention mass [queries, rows] that the full attention of a layer gives to each row, summed over heads."""
    heads, dim = q.shape[1:]
    q = q[chosen] * dim ** -0.5
    back = chosen[:, None] - torch.arange(plan.window, device=q.device)
    near = torch.einsum("nhd,nwd->nhw", q, win[back.clamp(min=0)]).float()
    near = near.masked_fill((back < plan.wlo[chosen][:, None])[:, None], float("-inf"))
    first, end = plan.rows(len(rows))
    r = torch.arange(len(rows), device=q.device)
    seen = (r >= first[chosen][:, None]) & (r < end[chosen][:, None])
    far = torch.einsum("nhd,rd->nhr", q, rows).float().masked_fill(~seen[:, None], float("-inf"))
    top = torch.maximum(torch.maximum(near.amax(2), far.amax(2)), sink)
    total = (near - top[..., None]).exp().sum(2) + (far - top[..., None]).exp().sum(2) + (sink - top).exp()
    return ((far - top[..., None]).exp() / total[..., None]).sum(1)


def index_loss(config, run, plan):
    """Cross entropy from the attention mass to the softmax of the index scores, weighted by that mass.

    A selecting layer learns from itself and the layers that reuse its choice; the candidate source also
    from the layers that select inside its blocks."""
    total, scored = 0.0, None
    targets = {}
    for source, layer, target, state in run.index_loss:
        scored = state["scored"]
        targets[source] = targets.get(source, 0) + target
        if source != config.candidate_source_layer_id and layer > config.candidate_source_layer_id >= 0:
            targets[config.candidate_source_layer_id] = targets[config.candidate_source_layer_id] + target
    for source, target in targets.items():
        s = scored[source]
        first, end = plan.rows(s.shape[1])
        r = torch.arange(s.shape[1], device=s.device)
        q = run.index_queries
        seen = (r >= first[q][:, None]) & (r < end[q][:, None])
        logp = (s * 4.0).masked_fill(~seen, -1e9).log_softmax(1)
        total = total - (target * logp).sum() / target.sum().clamp(min=1e-6)
    return total / len(targets)
