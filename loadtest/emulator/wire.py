"""What vLLM's answers look like: completions and their chunks, usage, renderings, model lists.

Source: answers of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadtest.emulator.bodies import Wish
from loadtest.emulator.exchange import Choice, Exchange

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-emulated"
DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]
encode = msgspec.json.encode


def event(content: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


class Shape:
    """The answer to one request, whole or in chunks."""

    def __init__(
        self, exchange: Exchange, wanted: Wish, *, name: str, created: int, model: str, chat: bool
    ) -> None:
        self._exchange = exchange
        self._wanted = wanted
        self._chat = chat
        whole = "chat.completion" if chat else "text_completion"
        kind = f"{whole}.chunk" if chat and wanted.stream else whole
        self._head = {"id": name, "object": kind, "created": created, "model": model}
        self._sent = {choice.index: 0 for choice in exchange.choices}

    # -- in one piece ----------------------------------------------------------

    def whole(self) -> bytes:
        """Return the whole answer."""
        choices = self._exchange.choices
        usage = self._usage(sum(len(choice.answer) for choice in choices))
        usage["prompt_tokens_details"] = self._details() | {"multimodal_tokens": None}
        usage["completion_tokens_details"] = None
        if not self._chat:
            usage["prompt_tokens_details"].setdefault("created_cache_tokens", None)
        answer = self._head | {
            "choices": [self._whole(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
        }
        if self._chat:
            answer |= {
                "prompt_logprobs": None,
                "prompt_token_ids": self._ids(choices[0].prompt_ids),
                "prompt_text": None,
            }
        answer |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        return encode(answer)

    def _whole(self, choice: Choice) -> Json:
        ending = {
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop,
            "token_ids": self._ids(choice.answer),
        }
        if self._chat:
            message = {
                "role": "assistant",
                "content": choice.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
            return {"index": choice.index, "message": message, **ending, "routed_experts": None}
        return {
            "index": choice.index,
            "text": choice.text,
            **ending,
            "prompt_logprobs": None,
            "prompt_token_ids": self._ids(choice.prompt_ids),
            "routed_experts": None,
        }

    # -- in chunks -------------------------------------------------------------

    def roles(self) -> list[bytes]:
        """Return the chunks with which the choices of a chat begin."""
        chunks = []
        for choice in self._exchange.choices:
            delta = {
                "index": choice.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = self._head | {"choices": [delta]} | self._continuous(0, choice)
            chunk |= {"prompt_token_ids": self._ids(choice.prompt_ids), "prompt_text": None}
            chunks.append(event(chunk))
        return chunks

    def chunk(self, choice: Choice, token: int) -> bytes:
        """Return the chunk that brings a choice's token."""
        last = token == len(choice.answer) - 1
        finish = choice.finish if last else None
        text = choice.pieces[token]
        ids = self._ids([choice.answer[token]])
        self._sent[choice.index] += 1
        if self._chat:
            delta: Json = {
                "index": choice.index,
                "delta": {"content": text},
                "logprobs": None,
                "finish_reason": finish,
            }
            if last:
                delta["stop_reason"] = choice.stop
            delta["token_ids"] = ids
        else:
            delta = {
                "index": choice.index,
                "text": text,
                "logprobs": None,
                "finish_reason": finish,
                "stop_reason": choice.stop if last else None,
                "prompt_token_ids": self._ids(choice.prompt_ids) if token == 0 else None,
                "token_ids": ids,
            }
        chunk = self._head | {"choices": [delta]}
        chunk |= self._continuous(self._sent[choice.index], choice)
        if last and not self._wanted.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return event(chunk)

    def usage(self) -> bytes:
        """Return the chunk with the usage of all choices."""
        usage = self._usage(sum(self._sent.values())) | {"prompt_tokens_details": self._details()}
        return event(
            self._head | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}
        )

    def _continuous(self, generated: int, choice: Choice) -> Json:
        if not (self._wanted.include_usage and self._wanted.continuous_usage):
            return {}
        usage: Json = {
            "prompt_tokens": choice.prompt,
            "total_tokens": choice.prompt + generated,
            "completion_tokens": generated,
        }
        if self._chat:
            usage["completion_tokens_details"] = None
        return {"usage": usage}

    # -- both ------------------------------------------------------------------

    def _usage(self, generated: int) -> Json:
        prompts = {id(choice.prompt_ids): choice.prompt for choice in self._exchange.choices}
        prompt = sum(prompts.values())
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "completion_tokens": generated,
        }

    def _details(self) -> Json:
        last = self._exchange.choices[-1]
        if self._chat:
            return {"cached_tokens": last.cached, "created_cache_tokens": last.created}
        return {"cached_tokens": last.cached}

    def _ids(self, ids: Sequence[int]) -> Sequence[int] | None:
        return ids if self._wanted.return_token_ids else None


def models(name: str, root: str, created: int, context: int) -> Json:
    """Return the list of models."""
    permission = {
        "id": "modelperm-emulated",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": None,
        "max_model_len": context,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}


def rendered(
    request_id: str, ids: Sequence[int], body: Mapping[str, Any], wanted: Wish, model: str
) -> Json:
    """Return one rendering: what an engine would be given for a prompt."""

    def number(name: str, default: float) -> float:
        value = body.get(name)
        return default if value is None else float(value)

    sampling = {
        "presence_penalty": number("presence_penalty", 0.0),
        "frequency_penalty": number("frequency_penalty", 0.0),
        "repetition_penalty": number("repetition_penalty", 1.0),
        "temperature": number("temperature", 1.0),
        "stop": list(wanted.stop),
        "stop_token_ids": [],
        "max_tokens": wanted.max_tokens,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }
    return {
        "request_id": request_id,
        "token_ids": ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": sampling,
        "model": model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": body.get("return_token_ids"),
        "output_mode": "tokens",
        "stream": wanted.stream,
        "stream_options": body.get("stream_options"),
        "cache_salt": wanted.salt,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
