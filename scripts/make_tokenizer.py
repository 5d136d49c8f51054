"""Make the tokenizer of the builtin model again: byte-level BPE over the topics of Python's `help()`.

    scripts/start scripts.make_tokenizer [FOLDER]

It was made once with CPython 3.11 and is shipped, since the text differs from one Python to the next; on the
same text it comes out the same. Byte-level, so it reads any text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.data.sources import python_docs
from scripts import ROOT

VOCABULARY = 320  # 256 bytes and the 63 commonest pieces: few enough to be learnt in a minute
END = "<|endoftext|>"


def main(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = {"special_tokens": [END], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, **kinds)
    tokenizer.train_from_iterator(python_docs(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= dict.fromkeys(("eos_token", "bos_token", "pad_token"), END)
    settings |= {"model_max_length": 512, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "recipes" / "builtin" / "tiny-gpt-neox")
