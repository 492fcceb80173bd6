# SPDX-License-Identifier: Apache-2.0
"""Load a model and its tokenizer from a local folder; import torch and transformers lazily."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore import Device

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Conversation", "LocalModel"]

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LocalModel:
    """Hold a causal language model of transformers and its tokenizer.

    Attributes
    ----------
    model, tokenizer
    eos : frozenset of int
        Ids of the tokens that end a text.
    context : int
        Maximum number of tokens in a sequence, from the model's config.
    """

    model: Any
    tokenizer: Any
    eos: frozenset[int]
    context: int

    @classmethod
    def load(cls, folder: Path, dtype: str | None, device: Device) -> LocalModel:
        """Read a folder with config.json, safetensors and a tokenizer; nothing is downloaded.

        Parameters
        ----------
        folder : Path
        dtype : str, optional
            float32, float16 or bfloat16. Default: the dtype of the config.
        device : Device
            Device of the model.

        Raises
        ------
        ValueError
            A file is missing in the folder, or transformers cannot read a file.
        OSError
            torch or transformers is not installed, or `device` is a GPU and torch has no CUDA.
        """
        _check_folder(folder)
        if dtype not in (None, *_DTYPES):
            raise ValueError(f"dtype is {dtype!r}, must be one of {', '.join(_DTYPES)}")
        transformers = _transformers()
        _check_torch(device)
        how = {"local_files_only": True, "trust_remote_code": False}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **how)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or "auto", use_safetensors=True, **how
            )
        except MemoryError:
            raise
        except Exception as error:
            # The readers of these libraries raise many types of errors for a malformed file.
            raise ValueError(f"{folder} cannot be read: {_first_line(error)}") from error
        return cls(_moved(model.eval(), device), tokenizer, _eos_of(model), _context_of(model))

    def token_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, by default with the special tokens of the tokenizer."""
        given = self.tokenizer(text, add_special_tokens=add_special_tokens)
        return [int(token) for token in given["input_ids"]]

    def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(
            self.tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class Conversation:
    """Build the prompt of each turn; it begins with the prompt of the previous turn.

    The tokenizer's chat template formats the messages. Without a template, a line follows the
    previous answer unchanged.
    """

    def __init__(self, local: LocalModel) -> None:
        self._local = local
        self._messages: list[Mapping[str, str]] = []
        self._tokens: list[int] = []

    def prompt(self, line: str) -> list[int]:
        """Return the tokens of all earlier turns and of this line.

        Raises
        ------
        ValueError
            The chat template refuses the messages.
        """
        if not self._local.tokenizer.chat_template:
            first = not self._tokens
            return [*self._tokens, *self._local.token_ids(line, add_special_tokens=first)]
        self._messages.append({"role": "user", "content": line})
        return self._rendered()

    def _rendered(self) -> list[int]:
        from jinja2 import TemplateError

        try:
            rendered = self._local.tokenizer.apply_chat_template(
                self._messages, add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses: {_first_line(error)}") from error
        return [int(token) for token in rendered["input_ids"]]

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        """Record the model's answer to a prompt."""
        self._tokens = [*prompt, *answer]
        self._messages.append({"role": "assistant", "content": self._local.text(answer)})


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; download the model first")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} has no *.safetensors")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise OSError(f"{error}: pip install 'kvcore[transformers]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _check_torch(device: Device) -> None:
    import torch

    if device.kind == "cuda" and not torch.cuda.is_available():
        raise OSError(
            f"torch {torch.__version__} finds no GPU for --device {device}; install torch with CUDA"
        )


def _moved(model: Any, device: Device) -> Any:
    """Move a model to a device and return it.

    Raises
    ------
    MemoryError
        The GPU has too little free memory.
    """
    import torch

    try:
        return model.to(str(device))
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryError(f"{device} has no room for the model: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _eos_of(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _context_of(model: Any) -> int:
    text = model.config.get_text_config(decoder=True)
    length = getattr(text, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else 2**31 - 1
