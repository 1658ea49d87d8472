"""The files that make a shipped shape take and give text: our own tokenizer and a chat template.

The tokenizer is a byte-level BPE, so that every text has token ids and every token id has a text:
the special tokens, the 256 bytes, then one token for each merge. That is what a random model needs,
whose answers are any ids.
"""

from __future__ import annotations

import itertools

import orjson

SPECIAL = (
    "<|endoftext|>",
    "<|begin|>",
    "<|im_end|>",
    "<|im_start|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    *(f"<|reserved_{at}|>" for at in range(6)),
)
"""The first token ids. Tags count as text in an answer, because parsers look for them there."""

_TAGS = tuple(token for token in SPECIAL if not token.startswith("<|"))


def tokenizer_files(merges: str, chat_template: str) -> dict[str, bytes]:
    """File name → content of a tokenizer's files.

    `merges` has one merge a line, two pieces with a space between, after comments that begin with
    ``#``; `chat_template` is Jinja.
    """
    lines = itertools.dropwhile(lambda line: line.startswith("# "), merges.splitlines())
    pairs = [line.split(" ") for line in lines]
    tokens = [*SPECIAL, *_letters(), *("".join(pair) for pair in pairs)]
    added = [
        {
            "id": at,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token not in _TAGS,
        }
        for at, token in enumerate(SPECIAL)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": pairs,
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    return {
        "tokenizer.json": orjson.dumps(tokenizer),
        "tokenizer_config.json": orjson.dumps(config, option=orjson.OPT_INDENT_2),
    }


def _letters() -> list[str]:
    """The printable character that stands for each of the 256 bytes, in the order of bytes, as in
    GPT-2: itself where it is printable and no space, else the next one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
