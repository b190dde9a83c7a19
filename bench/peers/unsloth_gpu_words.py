"""What both scripts that run Unsloth share: a tokenizer of made words, and the layers that get an adapter."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """The word `t7` is token 7."""
    words = Tokenizer(WordLevel({"</s>": 0, "<pad>": 1} | {f"t{n}": n for n in range(2, vocabulary)}, "<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", bos_token="t2")
