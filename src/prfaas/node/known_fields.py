"""Fields of OpenAI's two endpoints and of vLLM's extensions that a node does not serve, and the
values with which they say nothing. Pure.

A field with another value, and a field that is neither here nor in the structs of `request_schema`,
is refused by its name: a client must not take an answer for one that followed the field.
"""

from __future__ import annotations

from prfaas.contracts.openai_fields import WITHOUT_EFFECT as WITHOUT_EFFECT

# Accepted with these values and with null.
FIXED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "priority": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_interval": (1,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "mm_payload": ("tensors", "none"),  # the payload of images, which a node refuses
    "return_mm_kwargs": (False,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "custom_params": ({},),
}
FIXED_IN_COMPLETIONS: dict[str, tuple[object, ...]] = FIXED | {
    "suffix": ("",),
    "prompt_embeds": ([],),
}
FIXED_IN_CHAT: dict[str, tuple[object, ...]] = FIXED | {
    "echo": (False,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "chat_template": (),
    "chat_template_content_format": ("auto",),
    "include_reasoning": (True,),
    "return_prompt_text": (False,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
STREAM_OPTIONS: dict[str, tuple[object, ...]] = {
    "include_obfuscation": (False,),
}
