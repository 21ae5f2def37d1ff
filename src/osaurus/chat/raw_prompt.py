"""A prompt that is no conversation: text or token ids as they are, no template, no parser.

Special tokens in the text are honoured: whoever writes raw prompts writes the markup too.
"""

from __future__ import annotations

from osaurus.chat.encoding import refuse_hopeless
from osaurus.chat.fill import fill_ends, fill_format_of, fill_ids
from osaurus.chat.prompt import PreparedPrompt
from osaurus.errors import InvalidField
from osaurus.runtime.model import PromptModel, Tokenizer
from osaurus.types.chat import RawPrompt


def prepare_raw(model: PromptModel, prompt: RawPrompt) -> PreparedPrompt:
    """Raises `InvalidField` for an empty prompt, for ids beyond the vocabulary and for a suffix
    where the model does not fill in; `ContextLengthExceeded` for what no context could hold."""
    tokenizer = model.tokenizer
    if not isinstance(prompt.content, str):
        return _of_ids(model, prompt)
    refuse_hopeless(model, prompt.content + (prompt.suffix or ""))
    if prompt.suffix is not None:
        fill = fill_format_of(tokenizer)
        if fill is None:
            raise InvalidField(
                "suffix",
                f"{model.model_id} declares no fill-in-the-middle tokens; leave suffix out, or "
                "use a model that has them (Qwen2.5-Coder, StarCoder2, Code Llama, Codestral, ...)",
            )
        ids = fill_ids(tokenizer, fill, prompt.content, prompt.suffix)
        ids = with_bos(tokenizer, ids)
        return PreparedPrompt(token_ids=ids, text="", end_ids=fill_ends(tokenizer, fill))
    ids = tokenizer.encode(prompt.content, parse_special=True, add_bos=False)
    ids = with_bos(tokenizer, ids)
    if not ids:
        raise InvalidField("prompt", "must not be empty: this model has no token to start from")
    return PreparedPrompt(token_ids=ids, text=prompt.content)


def with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """`ids` behind one BOS, where the bundle starts raw text with it."""
    bos = tokenizer.bos_token_id
    if bos is None or not tokenizer.add_bos or ids[:1] == [bos]:
        return ids
    return [bos, *ids]


def _of_ids(model: PromptModel, prompt: RawPrompt) -> PreparedPrompt:
    if prompt.suffix is not None:
        raise InvalidField("suffix", "needs a prompt of text; with token ids write the marks too")
    ids = [int(i) for i in prompt.content]
    if not ids:
        raise InvalidField("prompt", "must not be empty")
    limit = model.tokenizer.vocab_size
    bad = next((i for i in ids if not 0 <= i < limit), None)
    if bad is not None:
        raise InvalidField("prompt", f"token ids are at least 0 and below {limit}, got {bad}")
    return PreparedPrompt(token_ids=ids, text="")
