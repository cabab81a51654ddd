"""The small byte-level BPE tokenizer that the project ships (bpe8k/) and the script that trained it."""
