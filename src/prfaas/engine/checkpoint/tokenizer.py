"""A byte-level tokenizer with chat markers: token id b is byte b, special tokens follow.

It needs no training and no download. A text has as many tokens as UTF-8 bytes, and decoding returns
it unchanged. The tokenizer adds nothing around a text; the template adds a conversation's markers.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD, START, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
# Three more make the vocabulary a multiple of 8, so that models need not pad theirs.
SPECIAL_TOKENS = (BOS, EOS, PAD, START, END, "<|extra_0|>", "<|extra_1|>", "<|extra_2|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def token_id(special: str) -> int:
    return 256 + SPECIAL_TOKENS.index(special)


def build_tokenizer() -> Tokenizer:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(directory: Path, *, max_tokens: int) -> None:
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte: the byte's character if
    that is printable, else one from 256 on (GPT-2's table, which `ByteLevel` uses)."""
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(spare)) for byte in range(256)]
