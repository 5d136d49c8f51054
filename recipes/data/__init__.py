"""Training data: sources, tokenization, packing into samples, and the order of samples."""

from .conversations import END_OF_TURN, Conversation, ConversationReader, common_length, plain_text
from .corpus import (
    Corpus,
    Preview,
    StreamedCorpus,
    build_corpus,
    few_rows,
    preview_data,
    read_index,
    shuffled_order,
)
from .example_prompts import LONGEST, NEW, SHOWN, Prompt, TypedPrompt, asked_in, prompt_of, typed_prompt
from .samples import MOST, Sample, SampleLimits, StoredSamples, batches, collate, pack_samples, unpack_samples
from .sources import Row, count_rows, decoded, no_rows, prefetch_dataset, read_rows, unread_files
from .tokenization import RowReader, RowTokenizer, TokenizedDocument, detect_row_type, make_row_tokenizer
