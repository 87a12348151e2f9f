"""Between text and token ids, as a Hugging Face checkpoint says: tokenizer, chat template, text
that grows. No torch; knows nothing of requests. Gateways and nodes use the same, so that a prompt
is the same tokens wherever it is read.
"""

from prfaas.text.chat import Chat
from prfaas.text.conversation import is_multimodal
from prfaas.text.detokenizer import AnswerText
from prfaas.text.tokenizer import ModelTokenizer, load_tokenizer

__all__ = ["AnswerText", "Chat", "ModelTokenizer", "is_multimodal", "load_tokenizer"]
