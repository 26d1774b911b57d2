"""DeepSeek-V4.1 inference.

>>> from deepinfer import LLM, SamplingParams
>>> llm = LLM()  # the demo model; LLM("path/to/checkpoint") for another
>>> outputs = llm.generate("Once", SamplingParams(temperature=0, max_tokens=8))
>>> text = outputs[0].outputs[0].text
"""

from deepinfer._deepinfer import __version__
from deepinfer.llm import LLM, Message
from deepinfer.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer.params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "Message",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]
