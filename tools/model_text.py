# SPDX-License-Identifier: Apache-2.0
"""What the programs in Python share: the project's environment, the model's place, its tokenizer and chat template."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
PROGRAM = ROOT / "build" / "tools" / "kvleaf-generate"
BROKEN = "\ufffd"  # what a character cut in half decodes to


class Failure(Exception):
    """What the user is told in one line before exit status 1."""


def enter_project_venv(modules: Sequence[str]) -> None:
    """Starts the script again in the project's .venv if a package is missing here."""
    missing = [m for m in modules if find_spec(m) is None]
    if not missing:
        return
    venv = ROOT / ".venv"
    python = venv / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != venv.resolve():
        os.execv(python, [str(python), str(Path(sys.argv[0]).resolve()), *sys.argv[1:]])
    raise Failure(f"missing Python packages: {', '.join(missing)}; make the environment with "
                  f"'python3 -m venv .venv && .venv/bin/pip install -r tools/requirements.txt'")


def require_files(program: Path, model: Path) -> None:
    if not program.exists():
        raise Failure(f"{program} is missing; 'meson setup build && ninja -C build' builds it")
    if not (model / "model.safetensors").exists():
        raise Failure(f"{model} holds no model; tools/get_model.py obtains one")


class Text:
    """The model's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.exists():
            raise Failure(f"{path} is missing; tools/get_model.py obtains a model")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.config: dict[str, Any] = {}
        config = folder / "tokenizer_config.json"
        if config.exists():
            self.config = json.loads(config.read_text(encoding="utf-8"))
        self.template = self._compile(self.config.get("chat_template"))

    @staticmethod
    def _compile(template: object) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if not isinstance(template, str):
            return None

        def refuse(message: str) -> None:
            raise Failure(f"chat template: {message}")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=["jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = refuse
        return environment.from_string(template)

    def special(self, name: str) -> str:
        token = self.config.get(name) or ""
        return token.get("content", "") if isinstance(token, dict) else token

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation, up to where the model's next turn begins."""
        from jinja2 import TemplateError

        if self.template is None:
            raise Failure("the model has no chat template")
        try:
            return str(self.template.render(messages=messages, add_generation_prompt=True,
                                            bos_token=self.special("bos_token"), eos_token=self.special("eos_token")))
        except TemplateError as error:
            raise Failure(f"chat template: {error}") from error

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """Token ids; with `specials` also those that the model wants around a text, such as a first one."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=specials).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class TextStream:
    """The text of tokens that come one by one. A character cut in half waits for its rest."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.tokens: list[int] = []
        # tokens[first:shown] is the context in which the next ones decode as they do in the whole text.
        self.first = self.shown = 0

    def add(self, tokens: Sequence[int]) -> str:
        self.tokens += tokens
        return self._fresh(False)

    def finish(self) -> str:
        return self._fresh(True)

    def _fresh(self, last: bool) -> str:
        before = self.text.decode(self.tokens[self.first:self.shown])
        now = self.text.decode(self.tokens[self.first:])
        if len(now) <= len(before) or (now.endswith(BROKEN) and not last):
            return ""
        self.first, self.shown = self.shown, len(self.tokens)
        return now[len(before):]
