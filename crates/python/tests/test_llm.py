"""The package over the demo model."""

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import deepinfer
from deepinfer import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The", "A little"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_tokens=8192, max_num_seqs=4, threads=2)


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(temperature=0, **more)  # type: ignore[arg-type]


def test_prompts_are_answered_in_order(llm: LLM) -> None:
    together = llm.generate(PROMPTS, greedy(max_tokens=12), use_tqdm=False)
    assert [output.prompt for output in together] == PROMPTS
    for prompt, output in zip(PROMPTS, together):
        (alone,) = llm.generate(prompt, greedy(max_tokens=12), use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].text == output.outputs[0].text
        assert output.outputs[0].finish_reason in ("stop", "length")
        assert output.prompt_token_ids == llm.encode(prompt)
    numbers = [int(output.request_id) for output in together]
    assert numbers == list(range(numbers[0], numbers[0] + len(PROMPTS)))


def test_token_ids_are_prompts(llm: LLM) -> None:
    ids = llm.encode(PROMPTS[0])
    params = greedy(max_tokens=5)
    expected = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs
    for found in (
        llm.generate(ids, params, use_tqdm=False),
        llm.generate([ids], params, use_tqdm=False),
        llm.generate(prompt_token_ids=[ids], sampling_params=params, use_tqdm=False),
    ):
        assert found[0].outputs[0].token_ids == expected[0].token_ids
        assert found[0].prompt is None
    assert llm.decode(llm.encode("some text", add_special_tokens=False)) == "some text"


def test_chat_answers(llm: LLM) -> None:
    talk = [{"role": "user", "content": "What is 23 + 58?"}]
    (output,) = llm.chat(talk, greedy(max_tokens=32), use_tqdm=False)
    assert "81" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].reasoning is None
    more = [{"role": "user", "content": "What is 12 + 30?"}]
    both = llm.chat([talk, more], greedy(max_tokens=32), use_tqdm=False)
    assert ["81" in both[0].outputs[0].text, "42" in both[1].outputs[0].text] == [True, True]
    (thought,) = llm.chat(talk, greedy(max_tokens=200), effort="high", use_tqdm=False)
    completion = thought.outputs[0]
    assert completion.reasoning and "81" in completion.text
    for part in (completion.reasoning, completion.text):
        assert "</think>" not in part
    stop = greedy(max_tokens=200, stop="81")
    (stopped,) = llm.chat(talk, stop, effort="high", use_tqdm=False)
    assert "81" not in stopped.outputs[0].text
    assert completion.text.startswith(stopped.outputs[0].text)
    with pytest.raises(ValueError, match="role"):
        llm.chat([{"role": "judge", "content": "x"}], use_tqdm=False)
    with pytest.raises(ValueError, match="colour"):
        llm.chat([{"role": "user", "content": "x", "colour": "red"}], use_tqdm=False)


def test_seeds_repeat(llm: LLM) -> None:
    def run(**more: object) -> list[int]:
        params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, **more)  # type: ignore[arg-type]
        output = llm.generate("The", params, use_tqdm=False)[0].outputs[0]
        if "seed" in more:
            assert output.seed == more["seed"]
        return output.token_ids

    assert run(seed=7) == run(seed=7) == run(seq_seed=7)
    assert run(seed=7) != run(seed=8)
    output = llm.generate("The", SamplingParams(max_tokens=6), use_tqdm=False)[0].outputs[0]
    again = llm.generate("The", SamplingParams(max_tokens=6, seed=output.seed), use_tqdm=False)
    assert again[0].outputs[0].token_ids == output.token_ids


def test_drafting_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    for draft in ("off", 3):
        other = LLM(kv_tokens=4096, max_num_seqs=2, threads=1, draft=draft)
        found = other.generate(PROMPTS, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in found] == expected
        drafted = sum(o.outputs[0].drafted_tokens for o in found)
        assert (drafted > 0) == (draft == 3)
        assert sum(other.metrics()["drafted_tokens"]) >= drafted


def test_log_probabilities(llm: LLM) -> None:
    params = greedy(max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    output = llm.generate("Once upon a time", params, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 4
    total = 0.0
    for token, scores in zip(completion.token_ids, completion.logprobs):
        assert len(scores) == 3 and scores[token].rank == 1
        assert sum(math.exp(score.logprob) for score in scores.values()) <= 1 + 1e-5
        total += scores[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    prompt = output.prompt_logprobs
    assert prompt is not None and len(prompt) == len(output.prompt_token_ids)
    assert prompt[0] is None
    assert all(ids is not None for ids in prompt[1:])


def test_parameters_are_kept(llm: LLM) -> None:
    plain = llm.generate("Once", greedy(max_tokens=20, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    word = plain.text[3:6]
    stopped = llm.generate("Once", greedy(max_tokens=20, ignore_eos=True, stop=word), use_tqdm=False)
    assert stopped[0].outputs[0].text == plain.text[: plain.text.index(word)]
    assert stopped[0].outputs[0].finish_reason == "stop"
    banned = plain.token_ids[0]
    biased = greedy(max_tokens=1, logit_bias={banned: -100.0})
    assert llm.generate("Once", biased, use_tqdm=False)[0].outputs[0].token_ids != [banned]
    allowed = greedy(max_tokens=3, allowed_token_ids=[40, 41])
    assert set(llm.generate("Once", allowed, use_tqdm=False)[0].outputs[0].token_ids) <= {40, 41}
    each = [greedy(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    found = llm.generate(PROMPTS, each, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in found] == [1, 2, 3]


def test_a_given_continuation_is_scored(llm: LLM) -> None:
    free = llm.generate("Once", greedy(max_tokens=6, ignore_eos=True, logprobs=0), use_tqdm=False)
    tokens = free[0].outputs[0].token_ids
    params = SamplingParams(
        seed=1, golden_token_ids=tokens[:4], max_tokens=6, ignore_eos=True, logprobs=0
    )
    forced = llm.generate("Once", params, use_tqdm=False)[0].outputs[0]
    assert forced.token_ids[:4] == tokens[:4] and len(forced.token_ids) == 6
    assert forced.logprobs is not None and free[0].outputs[0].logprobs is not None
    assert forced.logprobs[:4] == free[0].outputs[0].logprobs[:4]


def test_thinking_ends_with_its_budget(llm: LLM) -> None:
    talk = [{"role": "user", "content": "What is 23 + 58?"}]
    thoughts = []
    for budget in (None, 5):
        params = greedy(max_tokens=200, thinking_token_budget=budget)
        (output,) = llm.chat(talk, params, effort="high", use_tqdm=False)
        assert output.outputs[0].reasoning is not None and output.outputs[0].text
        thoughts.append(llm.encode(output.outputs[0].reasoning, add_special_tokens=False))
    assert len(thoughts[1]) <= 5 < len(thoughts[0])


def test_several_continuations(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    first, second = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    for output in (first, second):
        assert [each.index for each in output.outputs] == [0, 1, 2]
        assert len({tuple(each.token_ids) for each in output.outputs}) > 1
    alone = llm.generate(PROMPTS[0], SamplingParams(seed=5, max_tokens=8, ignore_eos=True))
    assert alone[0].outputs[0].token_ids == first.outputs[0].token_ids


def test_forms_are_followed(llm: LLM) -> None:
    schema = {"enum": ["ann", "bob", {"name": "bob"}]}
    form = {"schema_type": "json", "schema": json.dumps(schema)}
    found = llm.generate(PROMPTS, greedy(max_tokens=64), so_args=form, use_tqdm=False)
    for output in found:
        assert json.loads(output.outputs[0].text) in schema["enum"]
    digits = {"schema_type": "regex", "schema": "[0-9]{3}"}
    forms = [digits, None]
    number, free = llm.generate(PROMPTS[:2], greedy(max_tokens=8), so_args=forms, use_tqdm=False)
    assert number.outputs[0].text.isdigit() and len(number.outputs[0].text) == 3
    assert not free.outputs[0].text.isdigit()
    lark = {"schema_type": "ebnf", "schema": 'start: "yes" | "no"'}
    params = greedy(max_tokens=8, so_args=lark)
    assert llm.generate("x", params, use_tqdm=False)[0].outputs[0].text in ("yes", "no")
    # After thinking, which has no form.
    talk = [{"role": "user", "content": "What is 23 + 58?"}]
    word = {"schema_type": "regex", "schema": "[a-c]{3}"}
    params = greedy(max_tokens=300)
    (free,) = llm.chat(talk, params, effort="high", use_tqdm=False)
    (formed,) = llm.chat(talk, params, effort="high", so_args=word, use_tqdm=False)
    assert formed.outputs[0].reasoning == free.outputs[0].reasoning != ""
    text = formed.outputs[0].text
    assert len(text) == 3 and set(text) <= set("abc")
    for wrong in ({"schema_type": "json", "schema": "{"}, {"schema_type": "regex", "schema": "("}):
        with pytest.raises(ValueError, match="prompt 0"):
            llm.generate("x", so_args=wrong, use_tqdm=False)


def test_what_is_wrong_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="seq_seed"):
        SamplingParams(seed=1, seq_seed=2)
    with pytest.raises(ValueError, match="serialized"):
        SamplingParams(so_args={"schema_type": "json", "schema": "{}", "serialized": True})
    for params, name in (
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(min_p=2.0), "min_p"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(stop_token_ids=[10**6]), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=[10**6]), "allowed_token_ids"),
        (SamplingParams(golden_token_ids=[10**6]), "golden_token_ids"),
        (SamplingParams(thinking_token_budget=5), "thinking_token_budget"),
    ):
        with pytest.raises(ValueError, match=name):
            llm.generate("x", params, use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 1"):
        llm.generate([[1, 2], [10**6]], use_tqdm=False)
    with pytest.raises(ValueError, match="2 prompts, but 3"):
        llm.generate(PROMPTS[:2], [greedy()] * 3, use_tqdm=False)
    with pytest.raises(ValueError, match="either"):
        llm.generate(use_tqdm=False)
    with pytest.raises(ValueError, match="300000 bytes of text have .* tokens or more"):
        llm.generate("very " * 60_000, use_tqdm=False)
    # Only counted, any length will do.
    assert len(llm.encode("very " * 60_000)) >= 60_000
    with pytest.raises(ValueError, match="tokens or more"):
        llm.chat([{"role": "user", "content": "very " * 60_000}], use_tqdm=False)
    with pytest.raises(ValueError, match="draft"):
        LLM(draft="many")
    with pytest.raises(ValueError, match="blocks of at most"):
        LLM(draft=100)
    with pytest.raises(ValueError, match="kv_tokens is 8"):
        LLM(kv_tokens=8)
    with pytest.raises(ValueError, match="max_num_seqs is 70000"):
        LLM(max_num_seqs=70_000)
    with pytest.raises(MemoryError, match="TB needed .*; lower kv_tokens, max_num_seqs or max_num"):
        LLM(kv_tokens=1 << 36, device="cpu")
    with pytest.raises(OSError, match="no such folder"):
        LLM("/does/not/exist")
    assert llm.generate([], use_tqdm=False) == []


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, greedy(max_tokens=4, ignore_eos=True))
    assert "3/3 requests, 12 tokens" in capsys.readouterr().err
    llm.generate(PROMPTS, greedy(max_tokens=4), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_other_threads_run_meanwhile(llm: LLM) -> None:
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    start = time.monotonic()
    llm.generate(PROMPTS, greedy(max_tokens=200, ignore_eos=True), use_tqdm=False)
    seconds = time.monotonic() - start
    done.set()
    thread.join()
    # Not a timing: with the interpreter locked there would be no tick at all.
    assert ticks > 1, f"{ticks} ticks in {seconds} s"


LONG = """
import deepinfer, sys
llm = deepinfer.LLM(kv_tokens=8192, threads=1)
params = deepinfer.SamplingParams(max_tokens=6000, ignore_eos=True)
print("ready", flush=True)
try:
    llm.generate("Once", params, use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    short = deepinfer.SamplingParams(max_tokens=3, ignore_eos=True)
    print(len(llm.generate("Once", short, use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals differ")
def test_an_interrupt_gives_requests_up() -> None:
    run = [sys.executable, "-c", LONG]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    found, errors = process.communicate(timeout=60)
    assert found == "interrupted\n3\n", errors


def test_the_documentation_is_there() -> None:
    for thing in (deepinfer, LLM, LLM.generate, LLM.chat, SamplingParams):
        assert inspect.getdoc(thing)
    text = inspect.getdoc(LLM)
    assert text is not None
    for name in inspect.signature(LLM).parameters:
        assert f"{name}:" in text
    assert deepinfer.__version__.count(".") == 2
