"""What requests give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability under the model's own distribution."""

    logprob: float
    rank: Optional[int]
    """1 for the most probable token; ``None`` for one that is not among those asked for."""
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Which of the request's ``n``."""
    text: str
    """Text, without what stopped it; for ``LLM.chat`` the answer after any thinking."""
    reasoning: Optional[str]
    """The thinking before the answer, for ``LLM.chat`` with an effort."""
    token_ids: List[int]
    """Tokens, the one that stopped included."""
    logprobs: Optional[List[Dict[int, Logprob]]]
    """For each token, itself and the alternatives that were asked for."""
    cumulative_logprob: Optional[float]
    """Sum of the tokens' log-probabilities, if they were asked for."""
    finish_reason: Optional[str]
    """``"stop"``, ``"length"``, ``"abort"``, or ``"error"``."""
    error: Optional[str]
    """Why the request failed, for ``finish_reason`` ``"error"``."""
    seed: int
    """Key of the random choices: the same one gives the same tokens."""
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """What a prompt gave."""

    request_id: str
    prompt: Optional[str]
    """The prompt, if it was text."""
    prompt_token_ids: List[int]
    prompt_logprobs: Optional[List[Optional[Dict[int, Logprob]]]]
    """For each prompt token but the first, itself and its alternatives, if they were asked for."""
    outputs: List[CompletionOutput]
    num_cached_tokens: int
    """Prompt tokens whose state came from the prefix cache."""
    finished: bool = True
