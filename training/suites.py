"""Writes the held-out evaluation suites: one gzip file of JSON lines for each task.
    python suites.py models/demo/tokenizer.json models/demo/eval
    python suites.py models/demo/tokenizer.json more --count 300 --only sort,tool_call
Facts are always the same; of every other task, a larger suite starts with the items of a smaller one.
"""

import argparse
import base64
import gzip
import json

import draw
import tasks
from data import Encoder, messages_of
from chat import render
from rng import Rng
from words import FACTS

COUNT = 60
SHORT = ["add", "sub", "mul", "copy", "reverse", "sort", "json", "tool", "fact", "image", "talk", "story"]
LENGTHS = {"retrieval_250": (80, 250), "retrieval_1k": (900, 1024), "retrieval_4k": (3700, 4096), "retrieval_8k": (7500, 8150)}


def item(encoder, task, number, made, thinking, effort, quick):
    """One completion to ask for. `reasoning` is what training wrote; it is not scored."""
    out = dict(id=f"{task}-{number:03d}", task=task, thinking=thinking)
    if thinking:
        out.update(effort=effort, reasoning=tasks.reasoning(made, effort))
    user = made["user"]
    if "image" in made:
        url = "data:image/png;base64," + base64.b64encode(draw.png(made["image"])).decode()
        user = [dict(type="image_url", image_url=dict(url=url)), dict(type="text", text=user.replace("<｜image｜>", ""))]
    out["messages"] = [dict(role="user", content=user)]
    if made.get("tools"):
        out["tools"] = made["tools"]
    if made.get("json_object"):
        out["response_format"] = "json_object"
    if "call" in made and task == "tool_call":
        out.update(score="tool_call", expected=made["call"])
    elif "call" in made:
        call = dict(role="assistant", content="", tool_calls=[made["call"]])
        if thinking:
            call["reasoning"], out["reasoning"] = out["reasoning"], "I report the result."
        out["messages"] += [call, dict(role="tool", content=made["result"])]
        out.update(score="exact", expected=made["answer"])
    else:
        out.update(score="json" if task == "json" else "none" if task == "story" else "exact", expected=made["answer"])
    if "depths" in made:
        out["depths"] = made["depths"]
    answer = encoder.parts(render(messages_of(made, effort, thinking), thinking, effort, made.get("tools"), made.get("json_object", False)))[1]
    out["max_tokens"] = sum(answer) + 24
    if quick:
        out["quick"] = True
    return out


def build(encoder, wanted, most):
    for task in SHORT:
        name = "tool_call" if task == "tool" else task
        if name not in wanted and not (task == "tool" and "tool_result" in wanted):
            continue
        rng, lines, second = Rng(5000 + len(task) * 31 + ord(task[0])), [], []
        count = len(FACTS) if task == "fact" else most
        for i in range(count):
            made = tasks.fact_example(rng, *FACTS[i]) if task == "fact" else tasks.example(task, rng, True)
            thinking, effort = i % 2 == 1, ["low", "high", "max"][i // 2 % 3]
            lines.append(item(encoder, name, i, made, thinking, effort, i < (3 if task == "tool" else 8)))
            if task == "tool":
                second.append(item(encoder, "tool_result", i, made, thinking, effort, i < 3))
        yield name, lines
        if second:
            yield "tool_result", second
    for task, (low, high) in LENGTHS.items():
        if task not in wanted:
            continue
        rng, lines = Rng(6000 + high), []
        while len(lines) < most:
            made = tasks.example("retrieval", rng, True, tokens=rng.range(low, high * 12 // 10), depth=len(lines) % 10)
            if made["depths"][0] != len(lines) % 10 or not low <= len(encoder.text(made["user"])) + 8 <= high:
                continue
            i = len(lines)
            lines.append(item(encoder, task, i, made, i % 2 == 1, "high", i < {"retrieval_250": 8, "retrieval_1k": 4, "retrieval_4k": 1}.get(task, 0)))
        yield task, lines


def main():
    names = [name for task in SHORT for name in (["tool_call", "tool_result"] if task == "tool" else [task])] + list(LENGTHS)
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=COUNT, help="items a task")
    parser.add_argument("--only", default=",".join(names), help="these tasks alone")
    args = parser.parse_args()
    wanted = args.only.split(",")
    for name in wanted:
        if name not in names:
            parser.error(f"--only: there is no task {name!r}; tasks: {', '.join(names)}")
    for task, lines in build(Encoder(args.tokenizer), wanted, args.count):
        if task not in wanted:
            continue
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        with open(f"{args.folder}/{task}.jsonl.gz", "wb") as f:
            f.write(gzip.compress(text, 9, mtime=0))
        print(task, len(lines), len(text))


if __name__ == "__main__":
    main()
