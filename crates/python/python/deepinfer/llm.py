"""A model for many requests at once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from os import PathLike
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from deepinfer import _deepinfer
from deepinfer._progress import Progress
from deepinfer.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer.params import SamplingParams

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""

_Params = Union[SamplingParams, Sequence[SamplingParams], None]
_SoArgs = Union[Mapping[str, Any], Sequence[Optional[Mapping[str, Any]]], None]
_Prompt = Union[str, Sequence[int]]


class LLM:
    """A DeepSeek-V4.1 model, loaded once, for many requests at once.

    Args:
        model: Folder of a checkpoint as published; ``None``: the demo model inside this package.
        kv_tokens: Tokens that the cache pool holds, over all sequences; ``None``: 65536, or on a GPU
            what its free memory holds.
        max_num_seqs: Most requests that run at a time; others wait.
        max_num_batched_tokens: Most rows in a step.
        draft: Tokens drafted ahead: ``"auto"``, ``"off"`` or a number. Changes speed only.
        draft_scheme: ``"shared"``, or ``"rejection"`` (the same distribution, other tokens).
        prefill: How prompts go through the decoder layers: ``"exact"``, ``"off"``, ``"compact"`` or
            ``"mask"``.
        prefix_cache: Where prefixes of earlier requests are kept: ``"device"``, ``"off"``,
            ``"host"`` or ``"disk:DIR"``.
        kv_cache_dtype: How caches are stored: ``"released"`` or ``"exact"``.
        device: What the model runs on: ``"auto"``, ``"cpu"`` or ``"cuda:N"``.
        threads: Threads of the CPU; ``None``: all.

    Raises:
        ValueError: A setting is wrong, or the checkpoint cannot be run with it.
        MemoryError: There is not enough memory for the settings.
        OSError: The checkpoint cannot be read.

    Example:
        >>> llm = LLM()
        >>> outputs = llm.generate(["Once", "The"], SamplingParams(temperature=0))
        >>> texts = [output.outputs[0].text for output in outputs]
    """

    def __init__(
        self,
        model: Union[str, "PathLike[str]", None] = None,
        *,
        kv_tokens: Optional[int] = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 1024,
        draft: Union[str, int] = "auto",
        draft_scheme: str = "shared",
        prefill: str = "exact",
        prefix_cache: str = "device",
        kv_cache_dtype: str = "released",
        device: str = "auto",
        threads: Optional[int] = None,
    ) -> None:
        settings = {
            "kv_tokens": kv_tokens,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "draft": str(draft),
            "draft_scheme": draft_scheme,
            "prefill": prefill,
            "prefix_cache": prefix_cache,
            "kv_cache_dtype": kv_cache_dtype,
            "device": device,
            "threads": threads,
        }
        self._engine = _deepinfer.Engine(model, settings)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Union[str, Sequence[str], Sequence[int], Sequence[Sequence[int]], None] = None,
        sampling_params: _Params = None,
        *,
        prompt_token_ids: Optional[Sequence[Sequence[int]]] = None,
        so_args: _SoArgs = None,
        use_tqdm: bool = True,
    ) -> List[RequestOutput]:
        """Continues prompts.

        Args:
            prompts: A text, a list of texts, the token ids of one prompt, or a list of such.
            sampling_params: How tokens are chosen: one for all prompts, or one for each.
            prompt_token_ids: Token ids instead of ``prompts``.
            so_args: A form that the outputs must have (``SamplingParams.so_args``): one for all
                prompts, or one for each.
            use_tqdm: Whether to show progress on the terminal.

        Returns:
            One result for each prompt, in order.

        Raises:
            ValueError: A prompt or its parameters cannot be served; nothing has been run.
            KeyboardInterrupt: The requests have been given up.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("give either prompts or prompt_token_ids")
        given: Sequence[_Prompt] = (
            list(prompt_token_ids) if prompt_token_ids is not None else _prompts(prompts)
        )
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        ids = [
            self._engine.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in given
        ]
        return self._run(texts, ids, sampling_params, so_args, use_tqdm, thinks=False)

    def chat(
        self,
        messages: Union[Sequence[Message], Sequence[Sequence[Message]]],
        sampling_params: _Params = None,
        *,
        effort: Union[str, int] = "none",
        so_args: _SoArgs = None,
        use_tqdm: bool = True,
    ) -> List[RequestOutput]:
        """Answers conversations, in the model's chat format.

        Args:
            messages: A conversation (a list of messages), or a list of conversations.
            sampling_params: How tokens are chosen: one for all conversations, or one for each.
            effort: How thoroughly to think before the answer: ``"none"``, ``"minimal"``, ``"low"``,
                ``"medium"``, ``"high"``, ``"xhigh"``, ``"max"``, ``"ultra"`` or 0 to 100. The
                thinking is ``CompletionOutput.reasoning``.
            so_args: A form that the outputs must have, as for ``generate``; with thinking, it holds
                for what follows the thinking.
            use_tqdm: Whether to show progress on the terminal.

        Returns:
            One result for each conversation, in order.

        Raises:
            ValueError: A conversation or its parameters cannot be served; nothing has been run.
            KeyboardInterrupt: The requests have been given up.
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [
            self._engine.encode_chat([_message(m) for m in conversation], str(effort))
            for conversation in conversations
        ]
        ids = [prompt for prompt, _ in prompts]
        texts: List[Optional[str]] = [None] * len(ids)
        thinks = any(each for _, each in prompts)
        return self._run(texts, ids, sampling_params, so_args, use_tqdm, thinks=thinks)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> List[int]:
        """Token ids of a text, after the token that starts one unless told otherwise."""
        return self._engine.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self._engine.decode(list(token_ids))

    def metrics(self) -> Dict[str, Any]:
        """Counters since the start, such as drafted, verified and accepted tokens by position."""
        return self._engine.metrics()

    def _run(
        self,
        texts: Sequence[Optional[str]],
        ids: Sequence[Sequence[int]],
        sampling_params: _Params,
        so_args: _SoArgs,
        use_tqdm: bool,
        *,
        thinks: bool,
    ) -> List[RequestOutput]:
        params = _each("sampling_params", sampling_params, SamplingParams, len(ids))
        forms = _each("so_args", so_args, Mapping, len(ids))
        requests: List[Tuple[Sequence[int], Mapping[str, Any]]] = []
        for prompt, own, form in zip(ids, params, forms):
            own = own if own is not None else SamplingParams()
            own = own if form is None else replace(own, so_args=form)
            requests.append((prompt, self._native(own)))
        progress = Progress() if use_tqdm else None
        try:
            found = self._engine.generate(requests, thinks, progress)
        finally:
            if progress is not None:
                progress.close()
        return [self._output(*each) for each in zip(texts, ids, found)]

    def _native(self, params: SamplingParams) -> Mapping[str, Any]:
        stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        words = [w for word in params.bad_words or () for w in (word, " " + word.lstrip())]
        seed = params.seed if params.seed is not None else params.seq_seed
        return {
            "n": params.n,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "seed": None if seed is None else seed % 2**64,
            "stop": stop,
            "stop_token_ids": list(params.stop_token_ids or ()),
            "ignore_eos": params.ignore_eos,
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "logprobs": params.logprobs,
            "prompt_logprobs": params.prompt_logprobs,
            "bad_words": [self._engine.encode(word, False) for word in dict.fromkeys(words)],
            "allowed_token_ids": list(params.allowed_token_ids or ()),
            "logit_bias": list((params.logit_bias or {}).items()),
            "thinking_token_budget": params.thinking_token_budget,
            "golden_token_ids": list(params.golden_token_ids or ()),
            "so_args": None if params.so_args is None else dict(params.so_args),
        }

    def _output(
        self, prompt: Optional[str], ids: Sequence[int], found: List[_deepinfer.Completion]
    ) -> RequestOutput:
        first = found[0]
        scores: Optional[List[Optional[Dict[int, Logprob]]]] = None
        if first.prompt_logprobs is not None:
            scores = [None, *map(self._logprobs, first.prompt_logprobs)]
        return RequestOutput(
            request_id=str(next(self._ids)),
            prompt=prompt,
            prompt_token_ids=list(ids),
            prompt_logprobs=scores,
            outputs=[self._completion(i, completion) for i, completion in enumerate(found)],
            num_cached_tokens=first.cached_tokens,
        )

    def _completion(self, index: int, found: _deepinfer.Completion) -> CompletionOutput:
        logprobs = found.logprobs
        return CompletionOutput(
            index=index,
            text=found.text,
            reasoning=found.reasoning,
            token_ids=found.token_ids,
            logprobs=None if logprobs is None else [self._logprobs(each) for each in logprobs],
            cumulative_logprob=None if logprobs is None else sum(each[1] for each in logprobs),
            finish_reason=found.finish_reason,
            error=found.error,
            seed=found.seed,
            drafted_tokens=found.drafted_tokens,
            verified_tokens=found.verified_tokens,
            accepted_tokens=found.accepted_tokens,
        )

    def _logprobs(self, found: Tuple[int, float, List[Tuple[int, float]]]) -> Dict[int, Logprob]:
        token, logprob, top = found
        all_of_them = {token: Logprob(logprob, None, self.decode([token]))}
        for rank, (other, value) in enumerate(top, 1):
            all_of_them[other] = Logprob(value, rank, self.decode([other]))
        return all_of_them


def _prompts(prompts: Any) -> List[_Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    each: List[Any] = list(prompts)
    return [each] if each and all(isinstance(token, int) for token in each) else each


def _each(name: str, given: Any, kind: Any, count: int) -> Sequence[Any]:
    """One value for each of ``count`` prompts."""
    if given is None or isinstance(given, kind):
        return [given] * count
    values = list(given)
    if len(values) != count:
        raise ValueError(f"{count} prompts, but {len(values)} {name}")
    return values


def _message(message: Message) -> Tuple[str, str]:
    unknown = sorted(set(message) - {"role", "content"})
    if unknown:
        raise ValueError(f"a message has {', '.join(unknown)}; it may have role and content")
    return message["role"], message["content"]
