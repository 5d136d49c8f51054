"""Training data: sources, tokenization, packing into samples, and the order of samples."""

from .chat_template import common_length
from .conversations import Conversation, ConversationReader, plain_text
from .corpus import Corpus, Preview, build_corpus, few_rows, preview_data
from .example_prompts import LONGEST, NEW, SHOWN, Prompt, TypedPrompt, prompt_of, typed_prompt
from .sample_order import shuffled_order
from .samples import Sample, SampleLimits, batches, collate, pack_samples, unpack_samples
from .sources import Row, count_lines, count_rows, no_rows, prefetch_dataset, read_rows
from .stored_samples import MOST, StoredSamples
from .streaming import StreamedCorpus, read_index
from .tokenization import RowReader, RowTokenizer, TokenizedDocument, detect_row_type, make_row_tokenizer
