"""How tokens are chosen, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Sequence, Union


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    Every field is honoured or refused by name; unknown ones are a ``TypeError``. The same seed gives
    the same tokens, alone or beside other requests, with drafting or without.
    """

    n: int = 1
    """Independent continuations of the prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token each time."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this mass, in (0, 1]."""
    top_k: int = -1
    """Keep this many tokens; -1 or 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the best one, in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output holds."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    seed: Optional[int] = None
    """Key of the random choices; ``None``: 64 random bits, reported as ``CompletionOutput.seed``."""
    stop: Union[str, Sequence[str], None] = None
    """Stop before the first of these texts."""
    stop_token_ids: Optional[Sequence[int]] = None
    """Stop at these tokens."""
    ignore_eos: bool = False
    """Go on after the model's end of text."""
    max_tokens: Optional[int] = 16
    """Most tokens to produce; ``None``: as many as fit."""
    min_tokens: int = 0
    """Neither stop nor end for this many tokens."""
    logprobs: Optional[int] = None
    """Report the log-probability of each token, and of this many alternatives."""
    prompt_logprobs: Optional[int] = None
    """The same for the tokens of the prompt but the first."""
    bad_words: Optional[Sequence[str]] = None
    """Words that are never completed, with or without a space before them."""
    allowed_token_ids: Optional[Sequence[int]] = None
    """No other tokens are produced."""
    logit_bias: Optional[Mapping[int, float]] = None
    """Added to the logits of single tokens."""
    thinking_token_budget: Optional[int] = None
    """Most tokens of thinking, for ``LLM.chat`` with an effort; then the answer begins."""
    golden_token_ids: Optional[Sequence[int]] = None
    """The output begins with these tokens, whatever the model would choose: with ``logprobs`` they
    score a given continuation."""
    so_args: Optional[Mapping[str, Any]] = field(default=None)
    """A form that the output must have: ``{"schema_type": "json" | "regex" | "ebnf", "schema": str}``,
    optionally with ``trigger_token_ids`` (the form begins after these tokens) and ``bound_token_id``
    (after this token, those of the trigger are forced)."""
    seq_seed: Optional[int] = None
    """Another name of ``seed``."""

    def __post_init__(self) -> None:
        if self.seed is not None and self.seq_seed is not None and self.seed != self.seq_seed:
            raise ValueError(f"seed is {self.seed} and seq_seed {self.seq_seed}; give one of them")
        for name in ("seed", "seq_seed"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} is {value!r}; it must be an int")
        if self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least -1")
        if self.n < 1:
            raise ValueError(f"n is {self.n}; it must be at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        budget = self.thinking_token_budget
        if budget is not None and budget < 1:
            raise ValueError(f"thinking_token_budget is {budget}; it must be at least 1")
        if self.so_args is not None:
            _check_so_args(self.so_args)


_SO_ARGS = {"schema_type", "schema", "trigger_token_ids", "bound_token_id"}


def _check_so_args(args: Mapping[str, Any]) -> None:
    unknown = sorted(set(args) - _SO_ARGS)
    if unknown:
        raise ValueError(f"so_args: {', '.join(unknown)} is unknown; there are {sorted(_SO_ARGS)}")
    if args.get("schema_type") not in ("json", "regex", "ebnf"):
        raise ValueError(
            f"so_args: schema_type is {args.get('schema_type')!r}; it must be json, regex or ebnf"
        )
    if not isinstance(args.get("schema"), str):
        raise ValueError("so_args: schema must be a str")
    if args.get("bound_token_id") is not None and not args.get("trigger_token_ids"):
        raise ValueError("so_args: bound_token_id needs trigger_token_ids")
