"""Draws the training curves from the logs of all runs, in order.
    python plots.py OUT.svg LOG.jsonl...
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SHOWN = dict(copy="copy", sort="sort", add="add", sub="subtract", mul="multiply", json="JSON", tool="tool calls", fact="facts", image="pictures",
             kv250="retrieval 250", kv1000="retrieval 1K", kv4000="retrieval 4K", kv8000="retrieval 8K")


def main():
    out, paths = sys.argv[1], sys.argv[2:]
    loss, curves, edges, drafts, at = [], {}, [], [], 0.0
    for path in paths:
        entries, last = [json.loads(line) for line in open(path)], None
        for e in entries:
            t = (at + e["t"]) / 60
            if e["stage"] == "backbone" and e["phase"] != last:
                edges.append((t, {"short": "short", "rounded": "rounded caches", "polish": "polish", "vision": "pictures"}.get(e["phase"], e["phase"])))
                last = e["phase"]
            if "loss" in e and e["stage"] == "backbone":
                loss.append((t, e["loss"][0] if isinstance(e["loss"], list) else e["loss"]))
            if "loss" in e and e["stage"] == "draft":
                drafts.append((t, e["loss"][1]))
            for name, value in (e.get("accuracy") or e.get("final") or {}).items():
                if name in SHOWN:
                    curves.setdefault(name, []).append((t, 100 * value))
        at += entries[-1]["t"]
    figure, (top, middle, low) = plt.subplots(3, 1, figsize=(9, 8.5), height_ratios=[1, 2, 1])
    top.semilogy(*zip(*loss), color="black", linewidth=1)
    top.set_ylabel("loss of answers")
    colours = plt.get_cmap("tab20")
    for i, name in enumerate(SHOWN):
        if name in curves:
            middle.plot(*zip(*curves[name]), color=colours(i), label=SHOWN[name], linewidth=1.2)
    middle.set_ylabel("held-out exact match, %")
    middle.legend(fontsize=7, ncol=2, loc="center right", framealpha=0.9)
    seen = set()
    for t, name in edges:
        for axis in (top, middle):
            axis.axvline(t, color="0.85", linewidth=0.8, zorder=0)
        if name not in seen:
            middle.text(t, 103, name, fontsize=7, rotation=30)
        seen.add(name)
    low.plot(*zip(*drafts), color="tab:blue")
    low.set_ylabel("drafts accepted of 5\n(draft stages)")
    low.set_xlabel("minutes of all runs, start-up and compilation included")
    for axis in (top, middle, low):
        axis.set_xlim(0, at / 60)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
