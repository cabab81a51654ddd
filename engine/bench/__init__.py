"""Compares the engine, in process, with its peers on the same weights: ``kvbench dev bench-engine``.

The case: a Llama-shaped model of 32 M seeded weights in float32 or bfloat16, 32 requests of 32, 64, 128 or 512 random
prompt tokens, 64 greedy output tokens each, all there at the start. Sides take turns, repeat by repeat, so that a
machine that slows down slows all of them; a ratio is taken within one repeat. Each turn is a process of its own: load,
one unmeasured run, one measured run.

    case.py        the prompts
    sides.py       kvbench and transformers, as a turn's process runs them
    vllm_peer.py   vLLM, in an environment of its own; vllm_turn.py is what runs there
    turns.py       a turn in a process of its own
    compare.py     sides side by side: ratios, same tokens, bars
    command.py     the command line
"""
