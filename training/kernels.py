"""Two Triton kernels with plain PyTorch twins: attention over windows and compressed rows, and Sinkhorn.

Attention works on one packed row of N tokens. Query n sees the window keys wlo[n]..n, the compressed
rows clo[n]..chi[n]-1 (of these only the ones that `mask` keeps, if there is a mask) and a sink whose
value is zero. One KV vector serves all heads and is key and value at once.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU without Triton: the twins below do all the work
    triton = None


def attend_plain(q, win, rows, sink, plan, mask=None):
    """Dense twin. q [N, heads, D], win [N, D], rows [R, D] or None, sink [heads]; any dtype, f32 inside."""
    n, heads, dim = q.shape
    at = torch.arange(n, device=q.device)
    keep = (at[None] >= plan.wlo[:, None]) & (at[None] <= at[:, None])
    keys = win
    if rows is not None:
        r = torch.arange(len(rows), device=q.device)
        clo, chi = plan.rows(len(rows))
        seen = (r[None] >= clo[:, None]) & (r[None] < chi[:, None])
        if mask is not None:
            local = (r[None] - clo[:, None]).clamp(0, mask.shape[1] - 1)
            seen &= mask.gather(1, local).bool()
        keep, keys = torch.cat([keep, seen], 1), torch.cat([win, rows])
    s = torch.einsum("nhd,kd->nhk", q.float(), keys.float()) * dim ** -0.5
    s = s.masked_fill(~keep[:, None], float("-inf"))
    s = torch.cat([s, sink.float()[None, :, None].expand(n, heads, 1)], 2)
    return torch.einsum("nhk,kd->nhd", s.softmax(2)[..., :-1], keys.float()).to(q.dtype)


def sinkhorn_plain(logits, iterations, eps):
    """[N, S, S]: softmax over the last axis + eps, columns, then rows and columns alternately."""
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


if triton is not None:
    @triton.jit
    def _scores(q, k, keep, scale):
        s = tl.dot(q, tl.trans(k)) * scale
        return tl.where(keep, s, -1e30)

    @triton.jit
    def _forward(Q, W, C, SINK, WLO, CLO, CHI, M, OUT, LSE, n, nrows, ml, scale,
                 H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr):
        first = tl.program_id(0) * BQ
        r = first * H + tl.arange(0, BQ * H)  # (query, head) pairs are the rows of one tile
        d = tl.arange(0, D)
        query, head = r // H, r % H
        ok = query < n
        q = tl.load(Q + r[:, None] * D + d[None], mask=ok[:, None], other=0.0)
        wlo = tl.load(WLO + query, mask=ok, other=2147483647)
        m = tl.load(SINK + head).to(tl.float32)
        total = tl.full([BQ * H], 1.0, tl.float32)
        acc = tl.zeros([BQ * H, D], tl.float32)
        for k0 in range(tl.min(wlo), tl.minimum(first + BQ, n), BK):
            k = k0 + tl.arange(0, BK)
            key = tl.load(W + k[:, None] * D + d[None], mask=(k < n)[:, None], other=0.0)
            s = _scores(q, key, (k[None] >= wlo[:, None]) & (k[None] <= query[:, None]), scale)
            new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp(s - new[:, None])
            fade = tl.exp(m - new)
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None] + tl.dot(p.to(key.dtype), key)
            m = new
        if ROWS:
            clo = tl.load(CLO + query, mask=ok, other=2147483647)
            chi = tl.load(CHI + query, mask=ok, other=0)
            for k0 in range(tl.min(clo), tl.max(chi), BK):
                k = k0 + tl.arange(0, BK)
                key = tl.load(C + k[:, None] * D + d[None], mask=(k < nrows)[:, None], other=0.0)
                keep = (k[None] >= clo[:, None]) & (k[None] < chi[:, None])
                if MASK:
                    at = query[:, None].to(tl.int64) * ml + (k[None] - clo[:, None])
                    keep = keep & (tl.load(M + at, mask=keep, other=0) > 0)
                s = _scores(q, key, keep, scale)
                new = tl.maximum(m, tl.max(s, 1))
                p = tl.exp(s - new[:, None])
                fade = tl.exp(m - new)
                total = total * fade + tl.sum(p, 1)
                acc = acc * fade[:, None] + tl.dot(p.to(key.dtype), key)
                m = new
        tl.store(OUT + r[:, None] * D + d[None], (acc / total[:, None]).to(OUT.dtype.element_ty), mask=ok[:, None])
        tl.store(LSE + r, m + tl.log(total), mask=ok)

    @triton.jit
    def _grad_query(Q, W, C, WLO, CLO, CHI, M, DO, LSE, DELTA, DQ, n, nrows, ml, scale,
                    H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr):
        first = tl.program_id(0) * BQ
        r = first * H + tl.arange(0, BQ * H)
        d = tl.arange(0, D)
        query = r // H
        ok = query < n
        q = tl.load(Q + r[:, None] * D + d[None], mask=ok[:, None], other=0.0)
        do = tl.load(DO + r[:, None] * D + d[None], mask=ok[:, None], other=0.0)
        lse = tl.load(LSE + r, mask=ok, other=0.0)
        delta = tl.load(DELTA + r, mask=ok, other=0.0)
        wlo = tl.load(WLO + query, mask=ok, other=2147483647)
        acc = tl.zeros([BQ * H, D], tl.float32)
        for k0 in range(tl.min(wlo), tl.minimum(first + BQ, n), BK):
            k = k0 + tl.arange(0, BK)
            key = tl.load(W + k[:, None] * D + d[None], mask=(k < n)[:, None], other=0.0)
            s = _scores(q, key, (k[None] >= wlo[:, None]) & (k[None] <= query[:, None]), scale)
            ds = tl.exp(s - lse[:, None]) * (tl.dot(do, tl.trans(key)) - delta[:, None])
            acc += tl.dot(ds.to(key.dtype), key)
        if ROWS:
            clo = tl.load(CLO + query, mask=ok, other=2147483647)
            chi = tl.load(CHI + query, mask=ok, other=0)
            for k0 in range(tl.min(clo), tl.max(chi), BK):
                k = k0 + tl.arange(0, BK)
                key = tl.load(C + k[:, None] * D + d[None], mask=(k < nrows)[:, None], other=0.0)
                keep = (k[None] >= clo[:, None]) & (k[None] < chi[:, None])
                if MASK:
                    at = query[:, None].to(tl.int64) * ml + (k[None] - clo[:, None])
                    keep = keep & (tl.load(M + at, mask=keep, other=0) > 0)
                s = _scores(q, key, keep, scale)
                ds = tl.exp(s - lse[:, None]) * (tl.dot(do, tl.trans(key)) - delta[:, None])
                acc += tl.dot(ds.to(key.dtype), key)
        tl.store(DQ + r[:, None] * D + d[None], (acc * scale).to(DQ.dtype.element_ty), mask=ok[:, None])

    @triton.jit
    def _grad_keys(Q, K, LO, HI, QFIRST, QEND, M, DO, LSE, DELTA, DK, n, nkeys, ml, scale,
                   H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr):
        """Gradient of one block of keys (window keys, or compressed rows), as key and as value."""
        k = tl.program_id(0) * BK + tl.arange(0, BK)
        d = tl.arange(0, D)
        kok = k < nkeys
        key = tl.load(K + k[:, None] * D + d[None], mask=kok[:, None], other=0.0)
        begin = tl.min(tl.load(QFIRST + k, mask=kok, other=2147483647)) // BQ * BQ
        end = tl.max(tl.load(QEND + k, mask=kok, other=0))
        acc = tl.zeros([BK, D], tl.float32)
        for q0 in range(begin, end, BQ):
            r = q0 * H + tl.arange(0, BQ * H)
            query = r // H
            ok = query < n
            q = tl.load(Q + r[:, None] * D + d[None], mask=ok[:, None], other=0.0)
            do = tl.load(DO + r[:, None] * D + d[None], mask=ok[:, None], other=0.0)
            lse = tl.load(LSE + r, mask=ok, other=0.0)
            delta = tl.load(DELTA + r, mask=ok, other=0.0)
            lo = tl.load(LO + query, mask=ok, other=2147483647)
            if WINDOW:
                hi = query + 1
            else:
                hi = tl.load(HI + query, mask=ok, other=0)
            keep = (k[None] >= lo[:, None]) & (k[None] < hi[:, None]) & ok[:, None]
            if MASK:
                at = query[:, None].to(tl.int64) * ml + (k[None] - lo[:, None])
                keep = keep & (tl.load(M + at, mask=keep, other=0) > 0)
            s = _scores(q, key, keep, scale)
            p = tl.exp(s - lse[:, None])
            ds = p * (tl.dot(do, tl.trans(key)) - delta[:, None]) * scale
            acc += tl.dot(tl.trans(ds.to(q.dtype)), q) + tl.dot(tl.trans(p.to(q.dtype)), do)
        tl.store(DK + k[:, None] * D + d[None], acc.to(DK.dtype.element_ty), mask=kok[:, None])

    class _Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, win, rows, sink, plan, mask):
            q, win = q.contiguous(), win.contiguous()
            rows = None if rows is None else rows.contiguous()
            n, heads, dim = q.shape
            out = torch.empty_like(q)
            lse = torch.empty(n, heads, device=q.device, dtype=torch.float32)
            nrows = 0 if rows is None else len(rows)
            clo, chi = plan.rows(nrows) if nrows else (plan.wlo, plan.wlo)
            bq = 16
            _forward[(triton.cdiv(n, bq),)](q, win, rows if nrows else win, sink, plan.wlo, clo, chi, mask if mask is not None else win,
                                            out, lse, n, nrows, mask.shape[1] if mask is not None else 0, dim ** -0.5, H=heads, D=dim,
                                            BQ=bq, BK=64, ROWS=nrows > 0, MASK=mask is not None, num_warps=4, num_stages=2)
            ctx.save_for_backward(q, win, rows, sink, out, lse, mask)
            ctx.plan = plan
            return out

        @staticmethod
        def backward(ctx, do):
            q, win, rows, sink, out, lse, mask = ctx.saved_tensors
            plan, do = ctx.plan, do.contiguous()
            n, heads, dim = q.shape
            delta = (do.float() * out.float()).sum(-1)
            dsink = -(torch.exp(sink.float()[None] - lse) * delta).sum(0)
            nrows = 0 if rows is None else len(rows)
            clo, chi = plan.rows(nrows) if nrows else (plan.wlo, plan.wlo)
            ml, scale, bq, bk = mask.shape[1] if mask is not None else 0, dim ** -0.5, 16, 64
            any_mask = mask if mask is not None else win
            dq, dwin = torch.empty_like(q), torch.empty_like(win)
            _grad_query[(triton.cdiv(n, bq),)](q, win, rows if nrows else win, plan.wlo, clo, chi, any_mask, do, lse, delta, dq, n, nrows, ml,
                                               scale, H=heads, D=dim, BQ=bq, BK=bk, ROWS=nrows > 0, MASK=mask is not None, num_warps=4, num_stages=2)
            _grad_keys[(triton.cdiv(n, 32),)](q, win, plan.wlo, plan.wlo, plan.at, plan.wend, any_mask, do, lse, delta, dwin, n, n, ml, scale,
                                              H=heads, D=dim, BQ=bq, BK=32, WINDOW=True, MASK=False, num_warps=4, num_stages=1)
            drows = None
            if nrows:
                drows = torch.empty_like(rows)
                first, end = plan.readers(nrows)
                _grad_keys[(triton.cdiv(nrows, 32),)](q, rows, clo, chi, first, end, any_mask, do, lse, delta, drows, n, nrows, ml, scale,
                                                      H=heads, D=dim, BQ=bq, BK=32, WINDOW=False, MASK=mask is not None, num_warps=4, num_stages=1)
            return dq, dwin, drows, dsink.to(sink.dtype), None, None

    @triton.jit
    def _sinkhorn(X, OUT, n, eps, ITER: tl.constexpr, S: tl.constexpr, B: tl.constexpr):
        at = (tl.program_id(0) * B + tl.arange(0, B))[:, None, None]
        i, j = tl.arange(0, S)[None, :, None], tl.arange(0, S)[None, None, :]
        place = at * S * S + i * S + j
        m = tl.load(X + place, mask=at < n, other=0.0)
        m = tl.exp(m - tl.max(m, 2, keep_dims=True))
        m = m / tl.sum(m, 2, keep_dims=True) + eps
        m = m / (tl.sum(m, 1, keep_dims=True) + eps)
        for _ in range(ITER - 1):
            m = m / (tl.sum(m, 2, keep_dims=True) + eps)
            m = m / (tl.sum(m, 1, keep_dims=True) + eps)
        tl.store(OUT + place, m, mask=at < n)

    @triton.jit
    def _sinkhorn_grad(P, G, OUT, n, ITER: tl.constexpr, S: tl.constexpr, B: tl.constexpr):
        """Implicit derivative at the fixed point: dlogits = P * (G - a_i - b_j) with zero row and column sums."""
        at = (tl.program_id(0) * B + tl.arange(0, B))[:, None, None]
        i, j = tl.arange(0, S)[None, :, None], tl.arange(0, S)[None, None, :]
        place = at * S * S + i * S + j
        p = tl.load(P + place, mask=at < n, other=0.0)
        g = tl.load(G + place, mask=at < n, other=0.0)
        b = tl.sum(p * g, 1, keep_dims=True)
        a = tl.sum(p * (g - b), 2, keep_dims=True)
        for _ in range(ITER):
            b = tl.sum(p * (g - a), 1, keep_dims=True)
            a = tl.sum(p * (g - b), 2, keep_dims=True)
        tl.store(OUT + place, p * (g - a - b), mask=at < n)

    class _Sinkhorn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, iterations, eps):
            x = logits.contiguous()
            out = torch.empty_like(x)
            n, s = x.shape[0], x.shape[1]
            _sinkhorn[(triton.cdiv(n, 128),)](x, out, n, eps, ITER=iterations, S=s, B=128, num_warps=4)
            ctx.save_for_backward(out)
            ctx.iterations = iterations
            return out

        @staticmethod
        def backward(ctx, grad):
            (p,) = ctx.saved_tensors
            out, grad = torch.empty_like(p), grad.contiguous()
            n, s = p.shape[0], p.shape[1]
            _sinkhorn_grad[(triton.cdiv(n, 128),)](p, grad, out, n, ITER=ctx.iterations, S=s, B=128, num_warps=4)
            return out, None, None


def attend(q, win, rows, sink, plan, mask=None):
    if q.is_cuda and q.dtype == torch.bfloat16:
        return _Attend.apply(q, win, rows, sink, plan, mask)
    return attend_plain(q, win, rows, sink, plan, mask)


def sinkhorn(logits, iterations, eps):
    if logits.is_cuda:
        return _Sinkhorn.apply(logits, iterations, eps)
    return sinkhorn_plain(logits, iterations, eps)
