"""Names and values that one might expect, and that are none here.

Silent synonyms would make two spellings of one recipe with two hashes, so another tool's name is an error
that gives ours.
"""

from __future__ import annotations

# a switch that there is not -> what is so instead
UNSUPPORTED_KEYS: dict[str, str] = {
    "lossless": "there is no such switch: packets always go through zstd or lz4, which changes no value",
}

# (key, value) -> what to write instead
VALUE_HINTS: dict[tuple[str, str], str] = {
    (
        "swarm.join",
        "open",
    ): "`token`, and put the run URL where everybody finds it: it is all one needs",
}

# what axolotl, LLaMA-Factory, torchtune, older transformers and the reference code say -> what we say
FOREIGN_KEYS: dict[str, str] = {
    "base_model": "model.model_name_or_path",
    "model_name": "model.model_name_or_path",
    "torch_dtype": "model.dtype",
    "tokenizer": "model.tokenizer_name_or_path",
    "dataset": "datasets",
    "train_file": "datasets",
    "sequence_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "block_length": "data.max_length",
    "sample_packing": "data.packing",
    "packed": "data.packing",
    "template": "data.chat_template",
    "train_on_inputs": "data.completion_only_loss",
    "train_on_input": "data.completion_only_loss",
    "val_size": "data.val_set_size",
    "shuffle": "data.shuffle_dataset",
    "micro_batch_size": "training.per_device_train_batch_size",
    "batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "num_epochs": "training.num_train_epochs",
    "epochs": "training.num_train_epochs",
    "steps": "training.max_steps",
    "max_steps_per_epoch": "training.max_steps",
    "lr": "training.learning_rate",
    "optimizer": "training.optim",
    "lr_scheduler": "training.lr_scheduler_type",
    "warmup_ratio": "training.warmup_steps",
    "gradient_checkpointing": "training.activation_checkpointing",
    "clip_grad_norm": "training.max_grad_norm",
    "gradient_clipping": "training.max_grad_norm",
    "method": "compression.preset",
    "random_method": "compression.sample_kind",
    "RANDOMP_RATIO": "compression.random_ratio",
    "TOPK_RATIO": "compression.topk_ratio",
    "QUANT_BITS": "compression.quant_bits",
    "eval_strategy": "checkpoint.eval_steps",
    "evaluation_strategy": "checkpoint.eval_steps",
    "evals_per_epoch": "checkpoint.eval_steps",
    "save_strategy": "checkpoint.save_steps",
    "saves_per_epoch": "checkpoint.save_steps",
    "lora_rank": "lora.lora_r",
    "lora_target": "lora.lora_target_modules",
    "finetuning_type": "lora",
    "adapter": "lora",
}
