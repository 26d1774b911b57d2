from os import PathLike
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

__version__: str

# Token, its log-probability, the most probable tokens with theirs.
_Logprobs = Tuple[int, float, List[Tuple[int, float]]]

class Completion:
    text: str
    reasoning: Optional[str]
    token_ids: List[int]
    logprobs: Optional[List[_Logprobs]]
    prompt_logprobs: Optional[List[_Logprobs]]
    finish_reason: str
    error: Optional[str]
    seed: int
    cached_tokens: int
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int

class Engine:
    def __init__(
        self,
        model: Optional[Union[str, PathLike[str]]],
        settings: Mapping[str, Any],
    ) -> None: ...
    def encode(self, text: str, bos: bool) -> List[int]: ...
    def encode_prompt(self, text: str) -> List[int]: ...
    def encode_chat(
        self, messages: Sequence[Tuple[str, str]], effort: str
    ) -> Tuple[List[int], bool]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def metrics(self) -> Dict[str, Any]: ...
    def generate(
        self,
        requests: Sequence[Tuple[Sequence[int], Mapping[str, Any]]],
        thinks: bool,
        progress: Optional[Callable[[int, int, int], None]],
    ) -> List[List[Completion]]: ...
