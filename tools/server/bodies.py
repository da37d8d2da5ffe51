# SPDX-License-Identifier: Apache-2.0
"""Reads the bodies of requests: every field is served, says what is done anyway, or is refused by name."""
from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from .errors import ApiError

Fields = dict[str, Any]

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
EXACT = 1 << 53     # seeds are exact in JSON below this
SHOWN = 60          # characters of a wrong value that an error repeats

SAMPLING = {"model", "n", "temperature", "top_p", "seed", "stop", "max_tokens", "stream", "stream_options"}
CHAT_FIELDS = SAMPLING | {"messages", "max_completion_tokens"}
COMPLETION_FIELDS = SAMPLING | {"prompt"}

# Fields that are not served, and the values that ask for nothing beyond what is done anyway.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
CHAT_NEUTRAL: dict[str, tuple[object, ...]] = NEUTRAL | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
COMPLETION_NEUTRAL: dict[str, tuple[object, ...]] = NEUTRAL | {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
# Fields about the client, which change no answer.
WITHOUT_EFFECT = {"user", "safety_identifier", "metadata", "prompt_cache_key"}

# The model's template knows these; "developer" is the API's newer name of the system's role.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Limits:
    """What bodies are checked against."""

    model: str
    context: int        # tokens, prompt and answer together
    max_batch: int      # samples at once


@dataclass(frozen=True)
class Sampling:
    """How each prompt is continued."""

    n: int
    temperature: float
    top_p: float
    seed: int
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


def refuse(message: str, param: str | None = None, code: str | None = None) -> NoReturn:
    raise ApiError(400, message, param=param, code=code)


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def parse(body: bytes) -> Fields:
    """The body's object. Refuses what is no JSON, or holds text that is no Unicode."""
    try:
        text = body.decode("utf-8")
        fields = json.loads(text, parse_constant=no_constant)
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        refuse(f"the body is not UTF-8: byte {error.start} of {len(body)} is 0x{body[error.start]:02x}")
    except UnicodeEncodeError as error:
        refuse(f"the body holds half a surrogate pair, \\u{ord(error.object[error.start]):04x}")
    except RecursionError:
        refuse("the body is nested too deeply")
    except json.JSONDecodeError as error:
        refuse(f"the body is no JSON: {error.msg} at character {error.pos} of {len(text)}")
    except ValueError as error:
        refuse(f"the body is no JSON: {error}")
    if not isinstance(fields, dict):
        refuse(f"the body is {kind(fields)}, not an object")
    return fields


def kind(value: object) -> str:
    kinds = {str: "a string", bool: "a boolean", list: "an array", dict: "an object", int: "a number",
             float: "a number"}
    return kinds.get(type(value), "null")


def check_names(fields: Fields, served: Collection[str], neutral: dict[str, tuple[object, ...]]) -> None:
    for name, value in fields.items():
        if name in served or name in WITHOUT_EFFECT:
            continue
        if name not in neutral:
            refuse(f"unknown field: {name[:SHOWN]}", name[:SHOWN], "unknown_parameter")
        # 0 and False are equal in Python, and different here.
        if value is not None and not any(value == v and kind(value) == kind(v) for v in neutral[name]):
            refuse(f"{name} is not served: it is {shown(value)}", name, "unsupported_parameter")


def number(fields: Fields, name: str, low: float, high: float, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if kind(value) != "a number":
        refuse(f"{name} is {kind(value)}, not a number", name, "invalid_type")
    if not low <= value <= high:    # false for NaN
        refuse(f"{name} is {shown(value)}, not in {low:g} .. {high:g}", name, "invalid_value")
    return float(value)


def whole(fields: Fields, name: str, low: int, high: int, limit: str) -> int | None:
    """A whole number in low .. high, or None; `limit` says what high is."""
    value = fields.get(name)
    if value is None:
        return None
    if kind(value) != "a number" or (isinstance(value, float) and not (math.isfinite(value) and value.is_integer())):
        refuse(f"{name} is {shown(value)}, not a whole number", name, "invalid_type")
    if not low <= value <= high:
        refuse(f"{name} is {shown(value)}, not in {low} .. {high}{limit}", name, "invalid_value")
    return int(value)


def flag(fields: Fields, name: str, of: str = "") -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(f"{of}{name} is {kind(value)}, not a boolean", of + name, "invalid_type")
    return bool(value)


def read_stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        refuse(f"stop has {len(stops)} strings, the limit is {MAX_STOPS}", "stop", "array_above_max_length")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            refuse(f"stop holds {shown(stop)}, not a string of at least one character", "stop", "invalid_value")
        if len(stop) > MAX_STOP_CHARACTERS:
            refuse(f"stop holds a string of {len(stop)} characters, the limit is {MAX_STOP_CHARACTERS}", "stop",
                   "string_above_max_length")
    return tuple(stops)


def read_usage_option(fields: Fields, stream: bool) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        refuse(f"stream_options is {kind(options)}, not an object", "stream_options", "invalid_type")
    if not stream:
        refuse("stream_options is there, but stream is not true", "stream_options", "invalid_value")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            refuse(f"unknown field: stream_options.{name[:SHOWN]}", "stream_options", "unknown_parameter")
    if flag(options, "include_obfuscation", "stream_options."):
        refuse("stream_options.include_obfuscation is not served", "stream_options", "unsupported_parameter")
    return flag(options, "include_usage", "stream_options.")


def read_max_tokens(fields: Fields, limits: Limits) -> int | None:
    given = [name for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None]
    if len(given) > 1:
        refuse("max_tokens and max_completion_tokens are both there, they mean the same", "max_tokens", "invalid_value")
    return whole(fields, given[0], 1, limits.context, " (the context)") if given else None


def read_sampling(fields: Fields, limits: Limits) -> Sampling:
    model = fields.get("model")
    if model is not None and model != limits.model:
        raise ApiError(404, f"there is no model {shown(model)}, only {shown(limits.model)}", param="model",
                       code="model_not_found")
    seed = whole(fields, "seed", -(1 << 63), (1 << 63) - 1, "")
    stream = flag(fields, "stream")
    return Sampling(
        n=whole(fields, "n", 1, limits.max_batch, " (the batch)") or 1,
        temperature=number(fields, "temperature", 0, 2, 1),
        top_p=number(fields, "top_p", 0, 1, 1),
        seed=(secrets.randbits(64) if seed is None else seed) % EXACT,
        max_tokens=read_max_tokens(fields, limits),
        stops=read_stops(fields),
        stream=stream,
        include_usage=read_usage_option(fields, stream))


def text_of(content: object, where: str) -> str:
    """The text of a message: a string, or parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(f"{where} is {kind(content)}, neither a string nor an array of parts", where, "invalid_type")
    texts = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        if not isinstance(part, dict):
            refuse(f"{at} is {kind(part)}, not an object", at, "invalid_type")
        if part.get("type") != "text":
            refuse(f"{at}.type is {shown(part.get('type'))}, only \"text\" is served", at, "unsupported_parameter")
        if not isinstance(part.get("text"), str):
            refuse(f"{at}.text is {kind(part.get('text'))}, not a string", at, "invalid_type")
        texts.append(part["text"])
    return "".join(texts)


def read_messages(fields: Fields) -> list[dict[str, str]]:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        refuse(f"messages is {kind(messages)}, not an array", "messages", "invalid_type")
    if not messages:
        refuse("messages is empty, at least 1 is needed", "messages", "empty_array")
    found = []
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, dict):
            refuse(f"{at} is {kind(message)}, not an object", at, "invalid_type")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            refuse(f"{at}.role is {shown(role)}, not one of {', '.join(ROLES)}", at + ".role", "invalid_value")
        for name, value in message.items():
            if name not in ("role", "content", "name") and value not in (None, [], ""):
                refuse(f"{at}.{name[:SHOWN]} is not served", f"{at}.{name[:SHOWN]}", "unsupported_parameter")
        found.append({"role": ROLES[role], "content": text_of(message.get("content"), at + ".content")})
    return found


def read_chat(fields: Fields, limits: Limits) -> tuple[list[dict[str, str]], Sampling]:
    check_names(fields, CHAT_FIELDS, CHAT_NEUTRAL)
    return read_messages(fields), read_sampling(fields, limits)


def is_tokens(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def read_prompts(fields: Fields, vocabulary: int, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """A text, texts, token ids, or arrays of token ids; as token ids."""
    prompt = fields.get("prompt")
    prompts = prompt if isinstance(prompt, list) and not is_tokens(prompt) else [prompt]
    if not prompts:
        refuse("prompt is empty, at least 1 is needed", "prompt", "empty_array")
    found = []
    for value in prompts:
        if isinstance(value, str):
            found.append(encode(value))
        elif is_tokens(value):
            found.append(value)
        else:
            refuse(f"prompt holds {shown(value)}, neither text nor token ids", "prompt", "invalid_type")
    for tokens in found:
        if not tokens:
            refuse("prompt is empty, at least 1 token is needed", "prompt", "invalid_value")
        for token in tokens:
            if not 0 <= token < vocabulary:
                refuse(f"prompt holds token {shown(token)}, not in 0 .. {vocabulary - 1} (the vocabulary)", "prompt",
                       "invalid_value")
    return found


def read_completion(fields: Fields, limits: Limits) -> Sampling:
    check_names(fields, COMPLETION_FIELDS, COMPLETION_NEUTRAL)
    return read_sampling(fields, limits)
