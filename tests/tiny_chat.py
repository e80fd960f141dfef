"""A tokenizer for the tiny models: one token per printable character."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """97 ids: three special ones, then the characters from the space to "}"; others are unknown. Writes no BOS by itself."""
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: i for i, token in enumerate([*special, *map(chr, range(32, 126))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
