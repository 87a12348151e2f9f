"""Text to token ids and back, as a Hugging Face checkpoint defines it: tokenizer, chat template,
incremental detokeniser. Independent of torch and of requests. Gateways and nodes use the same code,
so that both get the same tokens from a prompt.
"""

from prfaas.text.chat import Chat
from prfaas.text.conversation import is_multimodal
from prfaas.text.detokenizer import AnswerText
from prfaas.text.tokenizer import ModelTokenizer, load_tokenizer

__all__ = ["AnswerText", "Chat", "ModelTokenizer", "is_multimodal", "load_tokenizer"]
